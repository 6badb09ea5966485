"""The addresses that the placement names: a block server connects to these only, whatever a frame says."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from corolla.chassis.errors import CorollaError
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import router_pb2

_KEPT_S: Final = 60.0
"""How long an address stays valid after a router stops naming it. A store that has lost its memory names few servers
for a while, and a server that comes back with another span is not named in between."""
_LEAST_INTERVAL_S: Final = 1.0
_INTERVAL_PER_SERVER_S: Final = 0.1
"""The interval grows with the servers, so that all together ask routers ten times a second, however many they are."""
_LEAST_PAUSE_S: Final = 0.1
"""The shortest pause between two look-ups of unknown addresses, so that frames with many of them load no router."""


class Neighbours:
    """The addresses of the last placement. They stay valid while no router answers.

    Args:
        placement: asks a router for all servers. May raise CorollaError.
        tasks: the background tasks of this server.
        clock: returns seconds.
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
        # Until when each address is valid; infinite while the newest placement names it.
        self._until_s: dict[str, float] = {}
        self._waiting: list[Callable[[bool], None]] = []
        self._last_look_s = -_LEAST_PAUSE_S

    def names(self, address: str) -> bool:
        """Whether the placement is known to name the address."""
        return address in self._until_s

    def look_again(self, then: Callable[[bool], None]) -> None:
        """Calls `then` once a router has been asked for the placement: a server that has just joined may be new here.

        All callers that wait at the same time share one request. The argument of `then` says whether a router has
        answered.
        """
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self._tasks.start(self._look(), "look for a neighbour")

    def take(self, address: str) -> None:
        """Adds an address that a client service knows from its placement, while no router answers here."""
        self._until_s[address] = self._clock() + _KEPT_S

    async def run(self) -> None:
        """Refreshes the addresses regularly, so that they are recent when no router answers."""
        while True:
            await self._refresh()
            await asyncio.sleep(max(_LEAST_INTERVAL_S, _INTERVAL_PER_SERVER_S * len(self._until_s)))

    async def _look(self) -> None:
        await asyncio.sleep(max(0.0, self._last_look_s + _LEAST_PAUSE_S - self._clock()))
        self._last_look_s = self._clock()
        # A caller that arrives after this point may know a newer placement than this request answers with.
        waiting, self._waiting = self._waiting, []
        was_answered = await self._refresh()
        for then in waiting:
            then(was_answered)

    async def _refresh(self) -> bool:
        """Asks for the placement. Returns whether a router has answered."""
        try:
            servers = await self._placement()
        except CorollaError:
            return False
        now_s = self._clock()
        left = {address: min(until_s, now_s + _KEPT_S) for address, until_s in self._until_s.items()}
        self._until_s = {address: until_s for address, until_s in left.items() if now_s < until_s}
        self._until_s |= dict.fromkeys((each.server.address for each in servers), math.inf)
        return True
