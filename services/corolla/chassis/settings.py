"""Settings: frozen models that are read from `COROLLA_*` variables, and that the command line overrides.

A service's own model inherits from `ServiceSettings`. The description of each field states its meaning and unit. A bad
value ends the process at start with a sentence that names key and value.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_settings import BaseSettings, SettingsConfigDict

from corolla.chassis.errors import SettingsError
from corolla.chassis.weight_formats import DtypeName, full_dtype_name

PREFIX = "COROLLA_"

REMOVED: Final[Mapping[str, str]] = {
    f"{PREFIX}ADMIN_HOST": "remove it; AdminService is on 127.0.0.1",
    f"{PREFIX}OFFLINE": "set HF_HUB_OFFLINE=1",
    f"{PREFIX}OIDC_ALGORITHMS": "remove it; there is nothing to set in its place",
    f"{PREFIX}MERGE_REPLAYED_STEPS": "remove it; replays process decoded tokens in chunks",
    f"{PREFIX}TUNING_BUDGET_S": "remove it; nothing is timed, and COROLLA_PRODUCTS=library takes the place of 0",
}
"""Variables that the release before had as settings, and what to do instead.

A log line warns of these. Other unknown variables with the prefix are ignored, since Kubernetes itself creates some.
"""

Dtype = Annotated[DtypeName, BeforeValidator(full_dtype_name)]
"""A dtype by its name or its abbreviation."""

_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogLevel = Annotated[
    _Level,
    BeforeValidator(lambda given: given.upper() if isinstance(given, str) else given),
    WithJsonSchema({"enum": [*get_args(_Level), *map(str.lower, get_args(_Level))], "type": "string"}),
]
"""A log level in upper or lower case: `info` is `INFO`."""


class ServiceSettings(BaseSettings):
    """The settings that every service has.

    Attributes:
        service_name: The service's name in traces.
    """

    service_name: ClassVar[str] = "corolla"

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", protected_namespaces=())

    host: str = Field("0.0.0.0", description="Address that the service listens on.")  # noqa: S104
    metrics_host: str = Field("0.0.0.0", description="Address that the metrics are served on.")  # noqa: S104
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus metrics; 0 takes a free one.")
    tls_dir: Path | None = Field(
        None,
        description="Folder with tls.crt, tls.key and ca.crt in PEM, as cert-manager writes them, and crl.pem if "
        "certificates are revoked; changes apply within five seconds. Services then connect by TLS 1.3 only, "
        "with certificates of both ends, which name "
        "`spiffe://<trust domain>/<role>/<name>`. Without it, connections are not encrypted. `COROLLA_ISSUER` and "
        "`COROLLA_JOIN_TOKEN_FILE` have the process get its certificate by itself.",
    )
    insecure: bool = Field(
        False,
        description="Whether other machines may reach the service although it does not authenticate them: without "
        "certificates or, for callers, without a certificate and keys or tokens. The log warns every minute.",
    )
    reflection: bool = Field(True, description="Whether gRPC reflection is served.")
    log_level: LogLevel = Field(
        "INFO", description="Least severe level that is logged; upper and lower case mean the same."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of log lines: `text` for people, `json` for machines."
    )
    audit: bool = Field(
        True,
        description="Whether calls of callers, acts of services, and denied calls are logged, one JSON line "
        "each: caller, method, outcome and numbers of tokens; never a text or a key.",
    )
    grace_s: float = Field(10.0, ge=0, le=600, description="Seconds that running calls get when the service stops.")

    @property
    def listening_hosts(self) -> Mapping[str, str]:
        """The addresses on which the service accepts calls, keyed by environment variable, without the metrics'."""
        return {"COROLLA_HOST": self.host}

    @property
    def missing_guards(self) -> tuple[str, ...]:
        """The unset variables that must be set so that the service authenticates its callers."""
        return () if self.tls_dir is not None else ("COROLLA_TLS_DIR",)


Settings = TypeVar("Settings", bound=BaseSettings)


def load(model: type[Settings], /, **overrides: Any) -> Settings:
    """Reads `model` from the environment; `overrides` that are not None win.

    Raises:
        SettingsError: Some values are bad; the message names each bad key with its value.
    """
    try:
        return model(**{key: value for key, value in overrides.items() if value is not None})
    except ValidationError as failure:
        lines = []
        for problem in failure.errors():
            key = PREFIX + "_".join(str(part) for part in problem["loc"]).upper()
            given = "" if problem["type"] == "missing" else f"={problem['input']!r}"
            lines.append(f"{key}{given}: {problem['msg']}")
        raise SettingsError("bad settings: " + "; ".join(lines)) from None
