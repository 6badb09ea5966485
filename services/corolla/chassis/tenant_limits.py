"""The limits and guarantees of tenants, read from the configured file."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Final, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from corolla.v1 import router_pb2 as pb

_SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60_000
PERIODS_MS: Final = {
    "requests_per_second": _SECOND_MS,
    "prompt_tokens_per_minute": _MINUTE_MS,
    "generated_tokens_per_minute": _MINUTE_MS,
}
"""The periods of the quotas that limit a rate. The other quotas limit what is in use at a time."""
COUNTED: Final = (*PERIODS_MS, "running_requests", "running_sequences", "open_streams", "reserved_tokens")
"""The quotas that requests use and the router counts."""
QUOTAS: Final = (*COUNTED, "stored_sessions", "stored_session_bytes")
"""All quotas. The last two are counted where sessions are stored."""
_GUARANTEES: Final = {"guaranteed_tokens": "reserved_tokens", "guaranteed_sequences": "running_sequences"}
"""Each guarantee, and the quota that limits the same resource."""

StandbyMode = Literal["off", "auto", "all"]
"""Which answers have standbys: none, those with long texts, or all."""
STANDBY_MODES: Final[tuple[StandbyMode, ...]] = get_args(StandbyMode)
"""Those with the fewest standbys come first."""

_Limit = Annotated[int, Field(ge=1, le=10**12)]


class TenantLimits(BaseModel):
    """The limits of one tenant. None as a limit leaves the service's own limits alone in force."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_second: _Limit | None = Field(
        default=None, description="Answers, new sessions and tokenised texts; a burst may have as many at once."
    )
    prompt_tokens_per_minute: _Limit | None = Field(
        default=None, description="Tokens of prompts, cached ones included."
    )
    generated_tokens_per_minute: _Limit | None = Field(
        default=None,
        description="Tokens of answers. Running answers continue; a tenant that has used more waits before "
        "its next one.",
    )
    running_requests: _Limit | None = Field(default=None, description="Answers that run or wait at a time.")
    running_sequences: _Limit | None = Field(
        default=None, description="Completions that run or wait at a time, of which a request may ask for several."
    )
    open_streams: _Limit | None = Field(
        default=None, description="Streamed answers at a time, each until its caller has taken all of it."
    )
    reserved_tokens: _Limit | None = Field(
        default=None,
        description="The most tokens that running answers may reach, prompts included; block servers reserve pages for "
        "them.",
    )
    stored_sessions: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        default=None, description="Sessions stored at a time; the router's COROLLA_MAX_TENANT_SESSIONS holds as well."
    )
    stored_session_bytes: _Limit | None = Field(
        default=None,
        description="Bytes of all stored sessions; a tenant that reaches them can create no session and begin no turn.",
    )
    guaranteed_tokens: _Limit | None = Field(
        default=None,
        description="Tokens whose pages every block server keeps free for this tenant, counted in whole pages of its "
        "sessions.",
    )
    guaranteed_sequences: _Limit | None = Field(
        default=None,
        description="Places for running sequences that every client service keeps free for this tenant.",
    )
    answer_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        default=None, description="Seconds after which an answer ends, as it does at the time limit of its request."
    )
    withhold_cached_tokens: bool = Field(
        default=False,
        description="Whether the number of cached prompt tokens is hidden from callers: usage says 0.",
    )
    standby: StandbyMode | None = Field(
        default=None,
        description="Which answers have standbys, in place of COROLLA_STANDBY; a request may ask for fewer.",
    )

    @property
    def are_counted(self) -> bool:
        """The router must count something to enforce these limits."""
        return any(getattr(self, quota) is not None for quota in COUNTED)

    def uses(self, amounts: dict[str, int], *, must_fit: bool) -> tuple[pb.QuotaUse, ...]:
        """Returns the uses to count for these amounts by quota; quotas without a limit are left out.

        Args:
            amounts: The amount to use of each quota.
            must_fit: Whether the uses are refused if one exceeds its limit; otherwise they are counted nevertheless.
        """
        return tuple(
            pb.QuotaUse(quota=quota, amount=amount, limit=limit, period_ms=PERIODS_MS.get(quota, 0), must_fit=must_fit)
            for quota, amount in amounts.items()
            if (limit := getattr(self, quota)) is not None
        )


NO_LIMITS: Final = TenantLimits()


def _guarantees_nothing(limits: TenantLimits) -> TenantLimits:
    if any(getattr(limits, each) is not None for each in _GUARANTEES):
        raise ValueError("must be set for named tenants only")
    return limits


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    default: Annotated[TenantLimits, AfterValidator(_guarantees_nothing)] = NO_LIMITS
    tenants: dict[Annotated[str, Field(min_length=1, max_length=256)], TenantLimits] = {}


class QuotaTable:
    """The limits of all tenants: a tenant's own entry overrides single limits of `default`."""

    def __init__(self, default: TenantLimits = NO_LIMITS, tenants: dict[str, TenantLimits] | None = None) -> None:
        self._default = default
        self._tenants = {
            name: default.model_copy(update=own.model_dump(exclude_unset=True)) for name, own in (tenants or {}).items()
        }

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Parses the file. Raises ValueError with a sentence that names the bad entry."""
        try:
            file = _File.model_validate_json(text)
        except ValidationError as failure:
            raise ValueError("; ".join(_sentences(failure))) from None
        table = cls(file.default, file.tenants)
        for (guarantee, bound), (tenant, limits) in product(_GUARANTEES.items(), table._tenants.items()):
            promised, most = getattr(limits, guarantee), getattr(limits, bound)
            if promised is not None and most is not None and promised > most:
                raise ValueError(f"tenants.{tenant}.{guarantee}: is more than {bound}, which is {most}")
        return table

    def of(self, tenant: str) -> TenantLimits:
        return self._tenants.get(tenant, self._default)

    def guaranteed(self, guarantee: Literal["guaranteed_tokens", "guaranteed_sequences"]) -> dict[str, int]:
        """Returns the guaranteed amounts by tenant; tenants without this guarantee are left out."""
        given = {tenant: getattr(limits, guarantee) for tenant, limits in self._tenants.items()}
        return {tenant: amount for tenant, amount in given.items() if amount is not None}


def _sentences(failure: ValidationError) -> Iterator[str]:
    for each in failure.errors(include_url=False):
        place = ".".join(map(str, each["loc"]))
        yield f"{place}: {each['msg']}" if place else each["msg"]
