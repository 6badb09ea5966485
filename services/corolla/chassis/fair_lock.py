"""A lock that tenants hold in turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from corolla.chassis.errors import QueueFull
from corolla.chassis.fair_queueing import FairQueueing


class FairLock:
    """An asyncio lock that is fair between tenants, not between calls.

    A tenant waits for the running turn and for at most one turn of each other tenant, however long the lines of those
    tenants are. All users of an instance share one event loop.

    Args:
        most_waiting: The greatest number of waiting turns, of all tenants together. When a further turn arrives, the
            tenant with the longest line loses its latest turn.
        refusal: The sentence that a refused caller gets.
    """

    def __init__(self, most_waiting: int, refusal: str) -> None:
        self._most_waiting = most_waiting
        self._refusal = refusal
        self._queueing = FairQueueing()
        # The waiting turns by tenant, without empty lines. A tenant that has had a turn moves to the end of this dict,
        # behind other tenants with the same stamp.
        self._lines: dict[str, list[asyncio.Future[bool]]] = {}
        self._current: asyncio.Future[bool] | None = None

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Waits for the tenant's turn, which lasts as long as the context. Raises QueueFull."""
        self._make_room(tenant)
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, []).append(turn)
        try:
            if self._current is None:
                self._begin_next()
            if not await turn:
                raise QueueFull(self._refusal)
            yield
        finally:
            if turn is self._current:
                self._begin_next()
            elif turn in (line := self._lines.get(tenant, [])):
                line.remove(turn)
                if not line:
                    del self._lines[tenant]

    def _make_room(self, tenant: str) -> None:
        if sum(map(len, self._lines.values())) < self._most_waiting:
            return
        longest = max(self._lines.values(), key=len)
        if len(longest) <= len(self._lines.get(tenant, ())) + 1:
            raise QueueFull(self._refusal)
        refused = longest.pop()
        if not refused.done():
            refused.set_result(False)

    def _begin_next(self) -> None:
        """Begins the next turn. `hold` calls it when a turn ends, so that no newcomer overtakes a waiting turn."""
        self._current = None
        if self._lines:
            tenant = min(self._lines, key=self._queueing.start)
            self._queueing.serve(self._queueing.stamp(tenant, 1))
            line = self._lines.pop(tenant)
            self._current = line.pop(0)
            if line:
                self._lines[tenant] = line
            # If the turn was cancelled meanwhile, `hold` ends it and begins the next one.
            if not self._current.done():
                self._current.set_result(True)
