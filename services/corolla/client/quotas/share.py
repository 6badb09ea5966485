"""The share of each tenant's quotas that this client service enforces by itself while no router counts. Pure.

The same rules as the router's `take_quotas` script has, with limits divided by the number of client services.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from corolla.chassis.tenant_limits import Use


@dataclass(frozen=True, slots=True)
class Shortage:
    """Of which quota there is too little, and in how many seconds there is enough; 0: when another request ends."""

    quota: str
    wait_s: float


@dataclass(slots=True)
class _Bucket:
    level: float
    since_s: float


@dataclass(slots=True)
class _Taken:
    """By one request."""

    spent: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    held: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class _Tenant:
    buckets: dict[str, _Bucket] = field(default_factory=dict)
    held: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    requests: dict[str, _Taken] = field(default_factory=dict)


class LocalShare:
    """Counts what requests of this client service use."""

    def __init__(self) -> None:
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)

    def take(
        self, tenant: str, request_id: str, uses: Sequence[Use], now_s: float, num_shares: int = 1
    ) -> Shortage | None:
        """Counts what a request has used by now, or nothing where a use that must fit does not."""
        state = self._tenants[tenant]
        taken = state.requests.get(request_id) or _Taken()
        filled: dict[str, _Bucket] = {}
        for use in uses:
            limit = max(1.0, use.limit / num_shares)
            if not use.period_ms:
                more = use.amount - taken.held[use.quota]
                if use.must_fit and more > 0 and state.held[use.quota] + more > limit:
                    return Shortage(use.quota, 0.0)
                continue
            more = max(0, use.amount - taken.spent[use.quota])
            bucket = state.buckets.get(use.quota) or _Bucket(limit, now_s)
            per_second = limit * 1000 / use.period_ms
            level = min(limit, bucket.level + max(0.0, now_s - bucket.since_s) * per_second)
            # More than a full bucket can only ever be taken from a full one.
            needed = min(more, limit)
            if use.must_fit and more > 0 and level < needed:
                return Shortage(use.quota, (needed - level) / per_second)
            filled[use.quota] = _Bucket(level - more, now_s)
        state.buckets.update(filled)
        for use in uses:
            if use.period_ms:
                taken.spent[use.quota] = max(taken.spent[use.quota], use.amount)
            else:
                state.held[use.quota] += use.amount - taken.held[use.quota]
                taken.held[use.quota] = use.amount
        state.requests[request_id] = taken
        return None

    def give_back(self, tenant: str, request_id: str) -> None:
        """The request has ended."""
        state = self._tenants[tenant]
        taken = state.requests.pop(request_id, None)
        if taken is not None:
            for quota, amount in taken.held.items():
                state.held[quota] -= amount

    def held(self, tenant: str, request_id: str) -> dict[str, int]:
        """What a request holds, by quota."""
        taken = self._tenants[tenant].requests.get(request_id)
        return dict(taken.held) if taken is not None else {}
