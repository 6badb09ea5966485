"""The settings of a client service, from `COROLLA_*` variables."""

import re
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from corolla.chassis.settings import Dtype, ServiceSettings
from corolla.chassis.tenant_limits import StandbyMode
from corolla.chassis.weight_formats import KVCacheDtypeName, QuantizationName
from corolla.trust.origins import AllowedOrigins

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9._/@-]{1,256}")


class ClientSettings(ServiceSettings):
    """The settings of one client service."""

    service_name: ClassVar[str] = "corolla-client"

    port: int = Field(50051, ge=0, le=65535, description="Port of the public API; 0 takes a free one.")
    max_connections: int = Field(
        4096,
        ge=1,
        description="The most gRPC connections at a time, and the most HTTP connections; further ones are refused at "
        "once. Each port accepts at most a quarter of the limit of open files (`ulimit -Hn`).",
    )
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the public HTTP API, which is compatible with OpenAI's; 0 takes a free one. "
        "Without it, HTTP is off; `corolla up` and the chart set 8080.",
    )
    http_page: bool = Field(
        True,
        description="Whether the HTTP port serves a page at `/` with a chat and the model's blocks, and the page's "
        "data at `/v1/placement`.",
    )
    http_origins: str = Field(
        "",
        description="Origins of web pages, such as `https://chat.example.org`, separated by commas: browsers let these "
        "pages send requests, and read the replies. `*`: all pages, with the callers' keys as the only guard. Pages of "
        "the service's own host need no entry.",
    )
    router: str = Field("127.0.0.1:50050", description="host:port of the router.")
    model: str = Field("demo", description="Checkpoint folder, GGUF file, hub id, or `demo`.")
    served_model_name: str = Field(
        "",
        description="Names that callers may give as the model, separated by commas; answers have the first one. "
        "Empty: the name of the checkpoint. `demo` always names the demo model.",
    )
    revision: str | None = Field(None, description="Revision of a hub id.")
    hub_patience_s: float = Field(
        300.0,
        ge=0,
        description="Seconds for which requests are repeated while the hub cannot be reached or breaks transfers off.",
    )
    dtype: Dtype = Field(
        "float32",
        description="Type of numbers with which the block servers compute; fp32, bf16, fp16 for short. Servers on a "
        "GPU take bfloat16 unless they are set otherwise.",
    )
    quantization: QuantizationName = Field(
        "none", description="How the block servers store their weights: `none`, `int8`, `int4` or `packed`."
    )
    kv_cache_dtype: KVCacheDtypeName = Field("auto", description="How the block servers store keys and values.")
    api_keys_file: Path | None = Field(
        None,
        description="File of callers' keys, as `corolla keys` writes it, or with lines `tenant:key`, keys of at least "
        "16 characters; changes apply within five seconds. Without keys and tokens, all callers are the tenant "
        "`public`.",
    )
    oidc_issuer: str = Field(
        "",
        description="Issuer of callers' access tokens (JWTs): an https address, which is their claim `iss`. Empty: "
        "access tokens are not accepted.",
    )
    oidc_audience: str = Field(
        "", validate_default=True, description="Audience that a token's claim `aud` must name; needed with an issuer."
    )
    oidc_jwks: str = Field(
        "",
        description="The issuer's key set: an https address, or a file, whose changes apply within five "
        "seconds; empty: the address in the issuer's OpenID configuration.",
    )
    oidc_ca_file: Path | None = Field(
        None,
        description="PEM file of the certificate authorities that sign the issuer's TLS certificate; without it, those "
        "of the system.",
    )
    oidc_tenant_claim: str = Field(
        "sub", min_length=1, description="Claim that names the tenant; `sub`: each subject is a tenant."
    )
    oidc_models_claim: str = Field(
        "",
        description="Claim that lists the models that a token allows; a token without it allows none. Empty: tokens "
        "allow all models.",
    )
    oidc_scopes_claim: str = Field(
        "",
        description="Claim that lists the scopes that a token allows: `generate`, `chat`, `sessions` and `tokenize`; "
        "other words are ignored, and a token without the claim allows none. Empty: tokens allow all scopes.",
    )
    quotas_file: Path | None = Field(
        None,
        description="JSON file with the quotas of tenants: docs/security.md#quotas; changes apply within five "
        "seconds. Without it there are no quotas.",
    )
    cache_secret: SecretStr = Field(
        SecretStr(""),
        description="Secret random text of at least 32 characters, the same for all client services of a model. It "
        "goes into the digests by which block servers find a tenant's texts in their prefix caches, and by which "
        "client services tell each other where texts are. Empty: the digests depend on the texts alone, and client "
        "services find only the texts of their own callers.",
    )
    public_tls_dir: Path | None = Field(
        None,
        description="Folder with tls.crt and tls.key in PEM for the public API; changes apply "
        "within five seconds. Without it, callers' connections are not encrypted.",
    )
    max_request_bytes: int = Field(4 << 20, ge=1024, le=32 << 20, description="Larger requests are refused.")
    max_running_requests: int = Field(
        256,
        ge=1,
        description="The most requests that are served at a time; each completion of a request counts as one. Further "
        "requests wait.",
    )
    max_waiting_requests: int = Field(
        256,
        ge=0,
        description="The most requests that wait for their turn; tenants share these places fairly. Further requests "
        "are refused.",
    )
    max_held_request_bytes: int = Field(
        256 << 20,
        ge=1024,
        description="The most bytes of all requests that are read, wait or run, and of replies that are not streamed "
        "and not sent yet, over gRPC and HTTP together. Further requests are refused; a reply that is made already is "
        "not. If several tenants may come, each holds at most as much as stays free for others.",
    )
    max_reply_mib: int = Field(
        64,
        ge=1,
        le=1024,
        description="The most MiB of a reply that is not streamed: a request whose reply could be larger is refused, "
        "and one that sets no number of tokens gets as many as fit. Callers of gRPC get at most what they state in the "
        "metadata `x-corolla-max-reply-bytes`, 4 MiB without it, and 64 in any case.",
    )
    trace_callers: bool = Field(
        False,
        description="Whether a request continues the trace in the caller's `traceparent` header, and is sampled if the "
        "header says so. Otherwise each request begins a trace of its own, which is sampled at the service's own rate "
        "and has a link to the caller's trace.",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="The most new tokens of a request that sets no number; unset: as many as the context, the tenant's "
        "quota and the servers' pages allow.",
    )
    prefill_chunk_tokens: int = Field(
        0,
        ge=0,
        description="The most tokens of one prefill step; 0: half of what the chain's servers take in one step, which "
        "is 256 on CPUs and 1024 on GPUs. At most a quarter while other requests decode on the same chain.",
    )
    max_microbatches: int = Field(
        0,
        ge=0,
        description="The most prefill steps of one request in flight at a time; each keeps one hop busy. 0: enough for "
        "all hops. If hops share processors, set fewer here and on the block servers.",
    )
    step_timeout_s: float = Field(60.0, gt=0, description="Seconds after which a step counts as lost.")
    recovery_patience_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that a recovery waits for a server that can replace a lost one, if the caller does not "
        "give up earlier. In this time a lease must end, a server must move or start, and it must load weights.",
    )
    standby: StandbyMode = Field(
        "auto",
        description="Which answers have standbys: servers to which hops copy keys and values while the answer goes on, "
        "so that the text is not computed again after a loss. `auto`: answers whose text would take longer than 0.15 "
        "seconds to compute again; `all`; or `off`. A tenant's quotas may say otherwise, and a request may ask for "
        "fewer.",
    )
    session_ttl_s: float = Field(1800.0, gt=0, description="Seconds that an idle conversation is kept.")
    speculation: Literal["off", "prompt_lookup", "draft_model"] = Field(
        "off",
        description="How speculation drafts tokens for requests that do not choose; the tokens of answers stay the "
        "same.",
    )
    max_draft_tokens: int = Field(16, ge=1, le=64, description="The most tokens drafted ahead in one step.")
    adaptive_drafts: bool = Field(
        True,
        description="Whether the number of draft tokens adapts to their success and cost; otherwise each step has as "
        "many as it may.",
    )

    @field_validator("http_origins")
    @classmethod
    def _origins_are_origins(cls, origins: str) -> str:
        AllowedOrigins.parse(origins)
        return origins

    @field_validator("served_model_name")
    @classmethod
    def _names_are_names(cls, names: str) -> str:
        for name in filter(None, map(str.strip, names.split(","))):
            if not MODEL_NAME.fullmatch(name):
                raise ValueError(f"{name!r} must have 1 to 256 letters, digits and any of ._-/@")
        return names

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that callers may use; answers have the first one. Empty: the checkpoint's own name."""
        return tuple(filter(None, map(str.strip, self.served_model_name.split(","))))

    @field_validator("oidc_issuer")
    @classmethod
    def _issuer_is_https(cls, issuer: str) -> str:
        if issuer and not issuer.startswith("https://"):
            raise ValueError("must begin with https://")
        return issuer

    @field_validator("oidc_audience")
    @classmethod
    def _audience_is_named(cls, audience: str, info: ValidationInfo) -> str:
        issuer = info.data.get("oidc_issuer")
        if issuer and not audience:
            raise ValueError("must be set with COROLLA_OIDC_ISSUER, to refuse tokens for other services")
        if audience and not issuer:
            raise ValueError("needs COROLLA_OIDC_ISSUER; without it, the service does not ask callers for tokens")
        return audience

    @field_validator("oidc_jwks")
    @classmethod
    def _keys_are_not_fetched_in_the_clear(cls, jwks: str, info: ValidationInfo) -> str:
        if "://" in jwks and not jwks.startswith("https://"):
            raise ValueError("must begin with https://, or name a file")
        if jwks and not info.data.get("oidc_issuer"):
            raise ValueError("needs COROLLA_OIDC_ISSUER; without it, the service does not ask callers for tokens")
        return jwks

    @property
    def missing_guards(self) -> tuple[str, ...]:
        """The names of the settings that are not set and would guard the public port.

        Callers of that port have no certificates, so `tls_dir` does not guard it.
        """
        missing = []
        if self.public_tls_dir is None:
            missing.append("COROLLA_PUBLIC_TLS_DIR")
        if self.api_keys_file is None and not self.oidc_issuer:
            missing.append("COROLLA_API_KEYS_FILE or COROLLA_OIDC_ISSUER")
        return tuple(missing)
