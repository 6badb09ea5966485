"""The share of each tenant's quotas that this client service enforces by itself while no router counts. Pure.

A share is the limit divided by the number of client services. What a tenant's requests hold here is compared with it;
what flows is counted in windows, each as long as the quota's period.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from corolla.chassis.errors import QuotaExceeded
from corolla.v1 import router_pb2 as pb


@dataclass(frozen=True, slots=True)
class _Window:
    """What was used in one window, by tenant and quota."""

    number: int
    used: Counter[tuple[str, str]] = field(default_factory=Counter)


class StaticShare:
    """Counts what no router has counted."""

    def __init__(self) -> None:
        # By the length in milliseconds. A window that is over takes its counts with it.
        self._windows: dict[int, _Window] = {}

    def take(
        self, tenant: str, uses: Sequence[pb.QuotaUse], held: Mapping[str, int], now_s: float, num_services: int
    ) -> None:
        """Counts what a request is going to use. Raises QuotaExceeded, and counts nothing, where it does not fit.

        Args:
            held: by quota, what the tenant's requests hold here already.
            num_services: that share the limits.
        """
        for use in uses:
            if use.must_fit and use.amount:
                used = self._window(use, now_s).used[tenant, use.quota] if use.period_ms else held.get(use.quota, 0)
                # What exceeds a whole share is taken from a window in which nothing was used yet.
                is_first = use.period_ms and not used
                if not is_first and used + use.amount > max(1.0, use.limit / num_services):
                    raise QuotaExceeded.of(use.quota, self._rest_s(use, now_s))
        for use in uses:
            if use.period_ms:
                self._window(use, now_s).used[tenant, use.quota] += use.amount

    def _window(self, use: pb.QuotaUse, now_s: float) -> _Window:
        number = int(now_s * 1000 // use.period_ms)
        if (window := self._windows.get(use.period_ms)) is None or window.number != number:
            window = self._windows[use.period_ms] = _Window(number)
        return window

    def _rest_s(self, use: pb.QuotaUse, now_s: float) -> float:
        """Seconds until the next window; 0 of what is held."""
        return (use.period_ms - now_s * 1000 % use.period_ms) / 1000 if use.period_ms else 0.0
