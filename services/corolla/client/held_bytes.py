"""The bytes of all requests and replies that a client service holds, of both doors, under one budget."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from corolla.chassis.audit import ANONYMOUS_CALLER
from corolla.chassis.calls import Call
from corolla.chassis.errors import QueueFull, ShareExceeded


class HeldBytes:
    """The budget.

    A request whose bytes do not fit is refused, and nothing waits for bytes. A reply that is made already is counted
    and never refused, so that it may exceed the budget; until it is sent, further requests are refused.

    If there may be several tenants, each holds at most as much as stays free for the others (Choudhury and Hahne:
    "Dynamic Queue Length Thresholds", 1998). So there is room for a newcomer, however much others ask for.

    Args:
        min_shares: returns the least number of tenants among which the service is shared, even if fewer are there.
    """

    def __init__(self, max_bytes: int, min_shares: Callable[[], int] = lambda: 1) -> None:
        self._max_bytes = max_bytes
        self._min_shares = min_shares
        self._num_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    def hold(self, call: Call[Any]) -> "Holding":
        """A context in which the bytes of a call are counted for its caller's tenant."""
        return Holding(self, "" if call.caller is ANONYMOUS_CALLER else call.caller.tenant)

    def check(self, tenant: str, num_bytes: int) -> None:
        """Raises QueueFull if a tenant must not hold more bytes now."""
        num_free = self._max_bytes - self._num_bytes - num_bytes
        num_own = self._by_tenant[tenant] + num_bytes
        min_shares = self._min_shares()
        if num_free < 0 or (min_shares > 1 and num_own > num_free):
            if num_own > self._max_bytes / max(min_shares, len({tenant, *self._by_tenant})):
                raise ShareExceeded(
                    "the service holds too many bytes of requests and replies of this tenant; try again"
                )
            raise QueueFull(
                "the service holds too many bytes of requests and of replies that nobody has read; try again"
            )

    def count(self, tenant: str, num_bytes: int) -> None:
        """Counts bytes that a tenant holds from now on, or fewer bytes if the number is negative."""
        self._num_bytes += num_bytes
        self._by_tenant[tenant] += num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Holding:
    """The bytes of one call, which are held until the end of the context.

    Attributes:
        num_bytes: how many they are.
    """

    def __init__(self, held: HeldBytes, tenant: str) -> None:
        self._held = held
        self._tenant = tenant
        self.num_bytes = 0
        self._num_expected = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.let_go()

    def take(self, num_bytes: int) -> None:
        """Counts bytes of the request. Raises QueueFull."""
        self._held.check(self._tenant, num_bytes)
        self._count(num_bytes)

    def expect_reply(self, num_bytes: int) -> None:
        """Counts bytes that the reply will surely have, before work is done for them. Raises QueueFull."""
        self.take(num_bytes)
        self._num_expected += num_bytes

    def add_reply(self, num_bytes: int) -> None:
        """Counts bytes of the reply that are there now."""
        num_expected = min(num_bytes, self._num_expected)
        self._num_expected -= num_expected
        self._count(num_bytes - num_expected)

    def let_go(self) -> None:
        """Counts none of the call's bytes any more."""
        self._count(-self.num_bytes)
        self._num_expected = 0

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._held.count(self._tenant, num_bytes)
