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

_NOTHING_INSTEAD: Final = "remove it; there is nothing to set in its place"

REMOVED: Final[Mapping[str, str]] = {
    f"{PREFIX}{name}": advice
    for name, advice in {
        **dict.fromkeys(
            (
                "HTTP_MAX_WATCHERS", "HTTP_READ_TIMEOUT_S", "LEASE_S", "MAX_CONNECTION_AGE_S", "MAX_INLINE_MS",
                "MAX_QUEUED_STEPS", "MAX_RECOVERIES", "MAX_REPLAYED_TOKENS", "OIDC_ALGORITHMS", "OIDC_REFRESH_S",
                "OIDC_SKEW_S", "OPEN_TIMEOUT_S", "POD_RELIST_INTERVAL_S", "PROBE_AFTER_S", "PROBE_TIMEOUT_S",
                "QUOTA_TIMEOUT_MS", "READER_TIMEOUT_S", "REBALANCE_INTERVAL_S", "REBALANCE_SETTLE_S",
                "RELIST_INTERVAL_S", "SPIN_US", "TURN_LOCK_MS",
            ),
            _NOTHING_INSTEAD,
        ),
        **dict.fromkeys(
            ("MAX_MIXED_STEP_MS", "PREFILL_TOKENS_BESIDE_DECODE", "PREFILL_TOKENS_DURING_DECODE"),
            "set COROLLA_MAX_BATCH_TOKENS; prompts get a quarter of it while other sessions decode",
        ),
        **dict.fromkeys(
            ("PREFILL_CHUNK_TOKENS_BESIDE_DECODE", "PREFILL_CHUNK_TOKENS_DURING_DECODE"),
            "set COROLLA_PREFILL_CHUNK_TOKENS; a step has at most a quarter of it while others decode",
        ),
        "ADMIN_HOST": "remove it; AdminService is on 127.0.0.1",
        "ENGINE": "remove it; for weights of four bits set COROLLA_QUANTIZATION=packed",
        "HEARTBEAT_INTERVAL_MS": "set COROLLA_LEASE_MS of the router; block servers send four heartbeats in that time",
        "HTTP_MAX_CONNECTIONS": "set COROLLA_MAX_CONNECTIONS",
        "KEPT_OUTPUTS_MIB": "set COROLLA_BOUNDARY_ACTIVATIONS_MIB",
        "KUBECONFIG": "set COROLLA_KUBERNETES to its path",
        "LEAN_BLOCKS": "set COROLLA_FUSED_BLOCKS",
        "OFFLINE": "set HF_HUB_OFFLINE=1",
        "MERGE_REPLAYED_STEPS": "remove it; replays process decoded tokens in chunks",
        "TUNING_BUDGET_S": "remove it; nothing is timed, and COROLLA_PRODUCTS=library takes the place of 0",
        "MAX_TOKENS_PER_FRAME": "set COROLLA_MAX_BATCH_TOKENS; a step may have at least 512 tokens in any case",
    }.items()
}  # fmt: skip
"""Variables that were settings once, and what to do instead.

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
