"""The addresses that the placement names: a block server connects to no other one, whatever a frame says."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from corolla.chassis.errors import CorollaError
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import router_pb2

_KEPT_S: Final = 60.0
"""An address counts for so long after a router no longer names it: a store that has lost its memory names few for a
while, and a server that comes back with another span is not named in between."""
_LEAST_INTERVAL_S: Final = 1.0
_INTERVAL_PER_SERVER_S: Final = 0.1
"""However many servers there are, all together ask routers ten times a second."""
_LEAST_PAUSE_S: Final = 0.1
"""Between two looks for addresses that are not known: whoever names many of them costs a router no more."""


class Neighbours:
    """What the placement named last. It stays while no router answers.

    Args:
        placement: asks a router for all servers. May raise CorollaError.
        tasks: of this server.
        clock: in seconds.
    """

    def __init__(
        self,
        placement: Callable[[], Awaitable[Sequence[router_pb2.PlacedServer]]],
        tasks: TaskGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._tasks = tasks
        self._clock = clock
        # Until when each address counts; for ever while the newest placement names it.
        self._until_s: dict[str, float] = {}
        self._waiting: list[Callable[[bool], None]] = []
        self._last_look_s = -_LEAST_PAUSE_S

    def names(self, address: str) -> bool:
        """Whether the placement named it, as far as is known here."""
        return address in self._until_s

    def look_again(self, then: Callable[[bool], None]) -> None:
        """Calls `then` once a router has been asked for the placement: a server that has just joined may be new here.

        All who wait at a time wait for one answer, or for the word that there is none. `then` gets whether a router has
        answered.
        """
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._tasks.start(self._look(), "look for a neighbour")

    def take(self, address: str) -> None:
        """Somebody else knows that the placement named it, while no router answers here."""
        self._until_s[address] = self._clock() + _KEPT_S

    async def run(self) -> None:
        """Keeps what is known fresh, for the time when no router answers."""
        while True:
            await self._refresh()
            await asyncio.sleep(max(_LEAST_INTERVAL_S, _INTERVAL_PER_SERVER_S * len(self._until_s)))

    async def _look(self) -> None:
        await asyncio.sleep(max(0.0, self._last_look_s + _LEAST_PAUSE_S - self._clock()))
        self._last_look_s = self._clock()
        # Who comes from now on may be of a placement that is younger than the answer.
        waiting, self._waiting = self._waiting, []
        was_answered = await self._refresh()
        for then in waiting:
            then(was_answered)

    async def _refresh(self) -> bool:
        """Whether a router has answered."""
        try:
            servers = await self._placement()
        except CorollaError:
            return False
        now_s = self._clock()
        left = {address: min(until_s, now_s + _KEPT_S) for address, until_s in self._until_s.items()}
        self._until_s = {address: until_s for address, until_s in left.items() if now_s < until_s}
        self._until_s |= dict.fromkeys((each.server.address for each in servers), math.inf)
        return True
