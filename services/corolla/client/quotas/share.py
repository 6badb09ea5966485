"""Enforces this client service's share of each tenant's quotas while no router counts. Pure.

A share is the limit divided by the number of client services. The amounts that a tenant's requests hold in this service
must not exceed the share. The use of a rate is counted in windows that are as long as the quota's period, and must not
exceed the share in any of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from corolla.chassis.errors import QuotaExceeded
from corolla.v1 import router_pb2 as pb


@dataclass(frozen=True, slots=True)
class _Window:
    """The use in one window, by tenant and quota."""

    number: int
    used: Counter[tuple[str, str]] = field(default_factory=Counter)


class StaticShare:
    """Counts the use of quotas that no router has counted, in the current windows."""

    def __init__(self) -> None:
        # The current windows by their length in milliseconds. A new window begins without counts.
        self._windows: dict[int, _Window] = {}

    def take(
        self, tenant: str, uses: Sequence[pb.QuotaUse], held: Mapping[str, int], now_s: float, num_services: int
    ) -> None:
        """Counts the use of a request. Raises QuotaExceeded, and counts nothing, if a part of it does not fit.

        Args:
            held: the amounts by quota that the tenant's requests already hold in this service.
            num_services: the number of client services that share the limits.
        """
        for use in uses:
            if use.must_fit and use.amount:
                used = self._window(use, now_s).used[tenant, use.quota] if use.period_ms else held.get(use.quota, 0)
                # A use larger than the share fits only into a window without earlier use.
                is_first = use.period_ms and not used
                if not is_first and used + use.amount > max(1.0, use.limit / num_services):
                    raise QuotaExceeded.used_up(use.quota, self._rest_s(use, now_s))
        for use in uses:
            if use.period_ms:
                self._window(use, now_s).used[tenant, use.quota] += use.amount

    def _window(self, use: pb.QuotaUse, now_s: float) -> _Window:
        number = int(now_s * 1000 // use.period_ms)
        if (window := self._windows.get(use.period_ms)) is None or window.number != number:
            window = self._windows[use.period_ms] = _Window(number)
        return window

    def _rest_s(self, use: pb.QuotaUse, now_s: float) -> float:
        """The seconds until the next window; 0 for a held amount."""
        return (use.period_ms - now_s * 1000 % use.period_ms) / 1000 if use.period_ms else 0.0
