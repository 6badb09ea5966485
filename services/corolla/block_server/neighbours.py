"""The addresses that the placement names, and which of the servers there share a GPU.

A block server connects to no other address, whatever a frame says.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.chassis.errors import CorollaError
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import router_pb2

_KEPT_S: Final = 60.0
"""How long an address stays valid after routers stop naming it. If their store has lost its data, they name few servers
for a while; and they do not name a server while it changes its span."""
_LEAST_INTERVAL_S: Final = 1.0
_INTERVAL_PER_SERVER_S: Final = 0.1
"""Each server asks a router once per interval, which grows with the number of servers: however many there are, all of
them together ask at most ten times a second."""
_LEAST_PAUSE_S: Final = 0.1
"""The shortest pause between two look-ups of unknown addresses, so that frames with many of them overload no router."""


@dataclass(eq=False, repr=False)
class Neighbours:
    """The addresses of the last placement. They stay valid while no router answers.

    Args:
        placement: asks a router for all servers. May raise CorollaError.
        on_placement: is called with the servers of each answer.
    """

    placement: Callable[[], Awaitable[Sequence[router_pb2.PlacedServer]]]
    tasks: TaskGroup
    clock: Callable[[], float] = time.monotonic
    on_placement: Callable[[Sequence[router_pb2.PlacedServer]], None] = lambda servers: None
    # Until when each address is valid; infinite while the newest placement names it.
    _until_s: dict[str, float] = field(init=False, default_factory=dict)
    _device_ids: dict[str, str] = field(init=False, default_factory=dict)
    _waiting: list[Callable[[bool], None]] = field(init=False, default_factory=list)
    _last_look_s: float = field(init=False, default=-_LEAST_PAUSE_S)

    def has_address(self, address: str) -> bool:
        return address in self._until_s

    def num_devices(self, addresses: Sequence[str]) -> int:
        """How many devices the servers at these addresses compute with. CPUs and unknown servers count by address."""
        return len({self._device_ids.get(address) or address for address in addresses})

    def look_again(self, then: Callable[[bool], None]) -> None:
        """Asks a router for the placement, and then calls `then`. The caller knows an address that is unknown here.

        The server at that address may have joined just now. All callers that wait at the same time share one request.
        The argument of `then` says whether a router has answered.
        """
        self._waiting.append(then)
        if len(self._waiting) == 1:
            self.tasks.start(self._look(), "look for a neighbour")

    async def finds(self, address: str) -> bool:
        """Returns whether the placement names an address, after asking a router if it is unknown here."""
        if not self.has_address(address):
            has_looked = asyncio.Event()
            self.look_again(lambda _: has_looked.set())
            await has_looked.wait()
        return self.has_address(address)

    def take(self, address: str) -> None:
        """Adds an address for a while. A client service knows it from its own placement, and no router answers here."""
        self._until_s[address] = self.clock() + _KEPT_S

    async def run(self) -> None:
        """Refreshes the addresses regularly, so that they are recent when no router answers."""
        while True:
            await self._refresh()
            await asyncio.sleep(max(_LEAST_INTERVAL_S, _INTERVAL_PER_SERVER_S * len(self._until_s)))

    async def _look(self) -> None:
        await asyncio.sleep(max(0.0, self._last_look_s + _LEAST_PAUSE_S - self.clock()))
        self._last_look_s = self.clock()
        # A caller that comes after this point may know of a server that joined after the router answered this request.
        waiting, self._waiting = self._waiting, []
        was_answered = await self._refresh()
        for then in waiting:
            then(was_answered)

    async def _refresh(self) -> bool:
        """Asks for the placement. Returns whether a router has answered."""
        try:
            servers = await self.placement()
        except CorollaError:
            return False
        now_s = self.clock()
        left = {address: min(until_s, now_s + _KEPT_S) for address, until_s in self._until_s.items()}
        self._until_s = {address: until_s for address, until_s in left.items() if now_s < until_s}
        self._until_s |= dict.fromkeys((each.server.address for each in servers), math.inf)
        self._device_ids = {each.server.address: each.server.device_id for each in servers}
        self.on_placement(servers)
        return True
