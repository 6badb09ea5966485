"""The settings of a client service, from `COROLLA_*` variables."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from corolla.chassis.settings import Dtype, ServiceSettings
from corolla.chassis.weight_formats import KVCacheDtypeName, QuantizationName
from corolla.client.api.tokens import ALGORITHMS


class ClientSettings(ServiceSettings):
    """The settings of one client service."""

    service_name: ClassVar[str] = "corolla-client"

    port: int = Field(50051, ge=0, le=65535, description="Port of the public API; 0 takes a free one.")
    max_connections: int = Field(
        4096, ge=1, description="Connections of gRPC at a time, and as many of HTTP; further ones are refused at once."
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
    router: str = Field("127.0.0.1:50050", description="host:port of the router.")
    model: str = Field("demo", description="Checkpoint folder, GGUF file, hub id, or `demo`.")
    revision: str | None = Field(None, description="Revision of a hub id.")
    offline: bool = Field(
        False, description="Never fetch from the hub; all files must be in its cache. HF_HUB_OFFLINE=1 means the same."
    )
    hub_patience_s: float = Field(
        300.0, ge=0, description="Seconds of retries while the hub cannot be reached or breaks off."
    )
    dtype: Dtype = Field("float32", description="Type that the block servers run; fp32, bf16, fp16 for short.")
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
        description="Issuer of callers' tokens, an https address, as in their claim `iss`; empty: tokens are not "
        "accepted.",
    )
    oidc_audience: str = Field(
        "", validate_default=True, description="What a token's claim `aud` must name; needed with an issuer."
    )
    oidc_jwks: str = Field(
        "",
        description="The issuer's key set: an https address, or a file, whose changes apply within five "
        "seconds; empty: the address in the issuer's OpenID configuration.",
    )
    oidc_ca_file: Path | None = Field(
        None, description="Certificate authorities for the issuer, in PEM; without it, those of the system."
    )
    oidc_algorithms: str = Field(
        "RS256,ES256", description="Accepted algorithms of tokens' signatures, with commas; only public-key ones."
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
        description="Claim that lists a token's scopes, likewise: `generate`, `chat`, `sessions` and `tokenize`; other "
        "words are ignored.",
    )
    quotas_file: Path | None = Field(
        None,
        description="JSON file with the quotas of tenants: docs/security.md#quotas; changes apply within five "
        "seconds. Without it there are no quotas.",
    )
    cache_secret: SecretStr = Field(
        SecretStr(""),
        description="Secret random text of at least 32 characters, the same for all client services of a model. The "
        "digests by which block servers find a tenant's texts depend on it. Empty: they depend on the texts alone.",
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
        description="Requests served at a time, of which each completion counts as one; further ones wait.",
    )
    max_waiting_requests: int = Field(
        256, ge=0, description="Requests that wait for their turn, shared fairly by tenants; further ones are refused."
    )
    max_held_request_bytes: int = Field(
        256 << 20,
        ge=1024,
        description="Bytes of all requests that run or wait; further ones are refused. Requests that are still being "
        "read over HTTP have a separate allowance of the same size, so slow callers block no other.",
    )
    trace_callers: bool = Field(
        False,
        description="Whether a request continues the trace in the caller's `traceparent`, sampled as that says. "
        "Otherwise each request begins a trace, sampled at the service's own rate, with a link to the caller's.",
    )
    default_max_tokens: int = Field(256, ge=1, description="The most new tokens of a request that sets no number.")
    prefill_chunk_tokens: int = Field(
        256,
        ge=1,
        description="Tokens of one prefill step; at most a quarter of them while others decode on the same chain.",
    )
    max_microbatches: int = Field(
        0,
        ge=0,
        description="Prefill steps of one request in flight at a time, which keep as many hops busy; 0: "
        "enough for all hops. Set fewer if hops share processors, the same as on the block servers.",
    )
    step_timeout_s: float = Field(60.0, gt=0, description="Seconds after which a step counts as lost.")
    recovery_patience_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that a recovery waits for a server that can replace a lost one, if its caller waits so "
        "long: a lease must end, a server must move or start, and weights must be loaded.",
    )
    merge_replayed_steps: bool = Field(
        True,
        description="Whether a replay processes decoded tokens in chunks; otherwise one by one again.",
    )
    session_ttl_s: float = Field(1800.0, gt=0, description="Seconds that an idle conversation is kept.")
    speculation: Literal["off", "prompt_lookup", "draft_model"] = Field(
        "off", description="Speculation for requests that do not choose; the tokens of answers stay the same."
    )
    max_draft_tokens: int = Field(16, ge=1, le=64, description="The most tokens drafted ahead in one step.")
    adaptive_drafts: bool = Field(
        True, description="Whether the number of draft tokens adapts to their success and cost; else it is the most."
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

    @field_validator("oidc_algorithms")
    @classmethod
    def _algorithms_have_public_keys(cls, names: str) -> str:
        given = [each.strip() for each in names.split(",")]
        if unknown := [each for each in given if each not in ALGORITHMS]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(ALGORITHMS)}")
        return ",".join(given)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The accepted algorithms of tokens' signatures."""
        return tuple(self.oidc_algorithms.split(","))

    @property
    def missing_guards(self) -> tuple[str, ...]:
        """The missing settings that would guard the public port, whose callers have no certificates."""
        missing = []
        if self.public_tls_dir is None:
            missing.append("COROLLA_PUBLIC_TLS_DIR")
        if self.api_keys_file is None and not self.oidc_issuer:
            missing.append("COROLLA_API_KEYS_FILE or COROLLA_OIDC_ISSUER")
        return tuple(missing)
