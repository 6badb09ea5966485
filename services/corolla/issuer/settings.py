"""The issuer's settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from corolla.chassis.settings import ServiceSettings
from corolla.trust.workload import Role


class IssuerSettings(ServiceSettings):
    """The settings of the issuer, which signs its own certificate unless `tls_dir` has one."""

    service_name: ClassVar[str] = "corolla-issuer"

    port: int = Field(50054, ge=0, le=65535, description="Port of IssuerService; 0 takes a free one.")
    authority_dir: Path = Field(
        description="Folder with the register of tokens and machines and, without `COROLLA_PODS_DIR`, the authority's "
        "key, which only its owner may read."
    )
    pods_dir: Path | None = Field(
        None,
        description="Folder with the authority (ca.crt, ca.key) and the token of each role (block.token, client.token, "
        "router.token, redis.token), such as the Secret of a release; every holder of a token gets certificates of its "
        "role, as often as it asks.",
    )
    redis: str = Field("", max_length=253, description="DNS name in the certificate of Redis.")
    trust_domain: str = Field(
        "local", pattern=r"^[a-z0-9._-]{1,255}$", description="Trust domain in the certificates that the issuer signs."
    )
    router: str = Field("127.0.0.1:50050", description="host:port of the router, which machines that join learn.")
    model: str = Field("demo", max_length=1024, description="Model that machines that join serve by default.")
    manifest: Path | None = Field(None, description="Manifest of that model's files, named by its SHA-256.")
    dtype: str = Field("float32", description="Their type of weights, cache and wire.")
    quantization: str = Field("none", description="Their quantisation of the weights.")

    @property
    def missing_guards(self) -> tuple[str, ...]:
        """Nothing is missing: strangers may reach the issuer."""
        return ()

    def names_of(self, role: Role) -> Sequence[str]:
        """The DNS names or addresses in the certificates of pods of a role, which their callers check."""
        names = {Role.ROUTER: self.router.rpartition(":")[0], Role.REDIS: self.redis}
        return [name] if (name := names.get(role)) else []
