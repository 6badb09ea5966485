"""One thing at a time, for which tenants take turns."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from corolla.chassis.errors import QueueFull

_Line = deque["asyncio.Future[None]"]


class Turns:
    """A tenant waits for what runs, and then for one turn of each other tenant, however much these have waiting.

    Of one event loop.

    Args:
        most_waiting: of all tenants. Where more come, the tenant with the longest line has its latest one refused.
        refusal: why, for who is refused.
    """

    def __init__(self, most_waiting: int, refusal: str) -> None:
        self._most_waiting = most_waiting
        self._refusal = refusal
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        """Those that have somebody in them; the first one has the next turn."""
        self._num_waiting = 0
        self._is_taken = False

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """The tenant's turn, once it has come. Raises QueueFull."""
        if self._is_taken:
            await self._wait(tenant)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        if self._num_waiting >= self._most_waiting:
            self._make_room(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            if not turn.cancelled() and turn.exception() is None:
                self._pass_on()
            raise

    def _make_room(self, tenant: str) -> None:
        longest = max(self._lines, key=lambda each: len(self._lines[each]))
        if len(self._lines[longest]) <= len(self._lines.get(tenant, ())) + 1:
            raise QueueFull(self._refusal)
        refused = self._lines[longest][-1]
        self._leave(longest, refused)
        if not refused.done():
            refused.set_exception(QueueFull(self._refusal))

    def _leave(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        line = self._lines.get(tenant)
        if line is not None and turn in line:
            line.remove(turn)
            self._num_waiting -= 1
            if not line:
                del self._lines[tenant]

    def _pass_on(self) -> None:
        """The turn has ended: the next one's begins, so that nobody who comes in between is before it."""
        while self._lines:
            tenant = next(iter(self._lines))
            turn = self._lines[tenant][0]
            self._leave(tenant, turn)
            if tenant in self._lines:
                self._lines.move_to_end(tenant)
            if not turn.done():  # nor cancelled in this moment
                turn.set_result(None)
                return
        self._is_taken = False
