"""Settings of a client service, from `COROLLA_*` variables."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from corolla.chassis.settings import Dtype, ServiceSettings
from corolla.chassis.weight_formats import KVCacheDtypeName, QuantizationName
from corolla.client.api.tokens import ALGORITHMS


class ClientSettings(ServiceSettings):
    """One client service."""

    service_name: ClassVar[str] = "corolla-client"

    port: int = Field(50051, ge=0, le=65535, description="Port of the public API; 0 takes a free one.")
    max_connections: int = Field(
        4096, ge=1, description="Connections of gRPC at a time, and as many of HTTP; further ones are refused at once."
    )
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the public API over HTTP, in OpenAI's dialect, at the same address; 0 takes a free one. "
        "Without it there is none; `corolla up` and the chart set 8080.",
    )
    http_page: bool = Field(
        True,
        description="Whether the port for HTTP has a page at `/`, with a chat and the model's blocks, and what that "
        "watches at `/v1/placement`.",
    )
    router: str = Field("127.0.0.1:50050", description="host:port of the router.")
    model: str = Field("demo", description="Checkpoint folder, GGUF file, hub id, or `demo`.")
    revision: str | None = Field(None, description="Revision of a hub id.")
    offline: bool = Field(
        False, description="Never ask the hub: what its cache lacks is missing. HF_HUB_OFFLINE=1 means the same."
    )
    hub_patience_s: float = Field(
        300.0, ge=0, description="Seconds for which a hub that is away, or breaks off, is asked again."
    )
    dtype: Dtype = Field("float32", description="Type that the block servers run; fp32, bf16, fp16 for short.")
    quantization: QuantizationName = Field(
        "none", description="How the block servers keep their weights: `none`, `int8`, `int4` or `packed`."
    )
    kv_cache_dtype: KVCacheDtypeName = Field("auto", description="How the block servers store keys and values.")
    api_keys_file: Path | None = Field(
        None,
        description="File of callers' keys, as `corolla keys` writes it, or with lines `tenant:key`, keys of at least "
        "16 characters; changes are taken within five seconds. Without keys and tokens everybody is the tenant "
        "`public`.",
    )
    oidc_issuer: str = Field(
        "",
        description="Issuer of callers' tokens, as their claim `iss` names it, an https address; empty: no tokens are "
        "taken.",
    )
    oidc_audience: str = Field(
        "", validate_default=True, description="What a token's claim `aud` must name; needed with an issuer."
    )
    oidc_jwks: str = Field(
        "",
        description="Where the issuer's key set is: an https address, or a file, whose changes are taken within five "
        "seconds; empty: where the issuer's OpenID configuration says.",
    )
    oidc_ca_file: Path | None = Field(
        None, description="Authorities by which the issuer is known, in PEM; without it, those of the system."
    )
    oidc_algorithms: str = Field(
        "RS256,ES256", description="By which tokens may be signed, with commas; only ones with public keys."
    )
    oidc_tenant_claim: str = Field(
        "sub", min_length=1, description="Claim of a token that names the tenant; `sub`: each subject is one."
    )
    oidc_models_claim: str = Field(
        "",
        description="Claim that lists the models that a token is for, which is for none without it; empty: tokens are "
        "for all models.",
    )
    oidc_scopes_claim: str = Field(
        "",
        description="Claim that lists the scopes, `generate`, `chat`, `sessions` and `tokenize`, likewise; other words "
        "in it do not count.",
    )
    quotas_file: Path | None = Field(
        None,
        description="File with the quotas of tenants, in JSON: docs/security.md#quotas; changes are taken within five "
        "seconds. Without it there are none.",
    )
    cache_secret: SecretStr = Field(
        SecretStr(""),
        description="Random text of at least 32 characters, the same for all client services of a model and known to "
        "nobody else: the digests by which block servers find a tenant's texts begin with what follows from it. Empty: "
        "they are digests of the texts alone.",
    )
    public_tls_dir: Path | None = Field(
        None,
        description="Folder with tls.crt and tls.key in PEM, shown to callers of the public API; changes are taken "
        "within five seconds. Without it callers speak in the clear.",
    )
    max_request_bytes: int = Field(4 << 20, ge=1024, le=32 << 20, description="Larger requests are refused.")
    max_running_requests: int = Field(
        256,
        ge=1,
        description="Requests served at a time, one for several completions counted as so many; further ones wait.",
    )
    max_waiting_requests: int = Field(
        256, ge=0, description="Requests that wait for their turn, shared fairly by tenants; further ones are refused."
    )
    max_held_request_bytes: int = Field(
        256 << 20,
        ge=1024,
        description="Bytes of all requests that run or wait; further ones are refused. Those that HTTP still reads "
        "have as many to themselves: slow ones take no room from those that are there.",
    )
    trace_callers: bool = Field(
        False,
        description="Whether a caller's `traceparent` decides: its trace goes on here, and is sampled where it says so."
        " Otherwise each request begins a trace, sampled at the service's own rate, which names the caller's.",
    )
    default_max_tokens: int = Field(256, ge=1, description="New tokens when the request does not say.")
    prefill_chunk_tokens: int = Field(
        256,
        ge=1,
        description="Tokens of one prefill step; a quarter of them, at most, while others decode on the same chain.",
    )
    max_microbatches: int = Field(
        0,
        ge=0,
        description="Prefill steps of one request that are under way at a time, which keep as many hops busy; 0: "
        "enough for all hops. Fewer where hops share processors; as many as the block servers' microbatches.",
    )
    step_timeout_s: float = Field(60.0, gt=0, description="Seconds after which a step counts as lost.")
    recovery_patience_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that a recovery waits for a server that can replace a lost one, and no longer than its "
        "caller: a lease must end, a server must move or start, and weights must be loaded.",
    )
    merge_replayed_steps: bool = Field(
        True,
        description="Whether a replay takes tokens in chunks that were processed one by one; else one by one again.",
    )
    session_ttl_s: float = Field(1800.0, gt=0, description="Seconds that an idle conversation is kept.")
    speculation: Literal["off", "prompt_lookup", "draft_model"] = Field(
        "off", description="How answers are drafted ahead where the request does not say; tokens stay the same."
    )
    max_draft_tokens: int = Field(16, ge=1, le=64, description="Tokens drafted ahead in one step at most.")
    adaptive_drafts: bool = Field(
        True, description="Whether the number of draft tokens follows their success and cost; else always the most."
    )

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
            raise ValueError("must be set with COROLLA_OIDC_ISSUER: else tokens for others would be taken")
        if audience and not issuer:
            raise ValueError("needs COROLLA_OIDC_ISSUER: else callers would not be asked for tokens")
        return audience

    @field_validator("oidc_jwks")
    @classmethod
    def _keys_are_not_fetched_in_the_clear(cls, jwks: str, info: ValidationInfo) -> str:
        if "://" in jwks and not jwks.startswith("https://"):
            raise ValueError("must begin with https://, or name a file")
        if jwks and not info.data.get("oidc_issuer"):
            raise ValueError("needs COROLLA_OIDC_ISSUER: else callers would not be asked for tokens")
        return jwks

    @field_validator("oidc_algorithms")
    @classmethod
    def _algorithms_have_public_keys(cls, names: str) -> str:
        given = [each.strip() for each in names.split(",")]
        if unknown := [each for each in given if each not in ALGORITHMS]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(ALGORITHMS)}")
        return ",".join(given)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms by which tokens may be signed."""
        return tuple(self.oidc_algorithms.split(","))

    @property
    def missing_guards(self) -> tuple[str, ...]:
        """The settings that would guard the public port, whose callers have no certificates, and that are missing."""
        missing = []
        if self.public_tls_dir is None:
            missing.append("COROLLA_PUBLIC_TLS_DIR")
        if self.api_keys_file is None and not self.oidc_issuer:
            missing.append("COROLLA_API_KEYS_FILE or COROLLA_OIDC_ISSUER")
        return tuple(missing)
