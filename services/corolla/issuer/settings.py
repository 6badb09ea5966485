"""The issuer's settings."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from corolla.chassis.settings import ServiceSettings


class IssuerSettings(ServiceSettings):
    """The settings of the issuer, whose own certificate is in `tls_dir`."""

    service_name: ClassVar[str] = "corolla-issuer"

    port: int = Field(50054, ge=0, le=65535, description="Port of IssuerService; 0 takes a free one.")
    authority_dir: Path = Field(
        description="Folder with the authority's key and the register of tokens and machines, which only its owner may "
        "read."
    )
    trust_domain: str = Field(
        "local", pattern=r"^[a-z0-9._-]{1,255}$", description="Trust domain in the certificates that the issuer signs."
    )
    router: str = Field("127.0.0.1:50050", description="host:port of the router, which machines that join learn.")
    model: str = Field("demo", max_length=1024, description="Model that machines that join serve by default.")
    manifest: Path | None = Field(None, description="Manifest of that model's files, named by its SHA-256.")
    dtype: str = Field("float32", description="Their type of weights, cache and wire.")
    quantization: str = Field("none", description="Their quantisation of the weights.")
