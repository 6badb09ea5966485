"""Has other block servers connect to this one, so that it knows before it is ready whether they reach it.

A chain may lead from any server to any other one. So a server that has loaded its span asks those that are ready to
connect to its address, where they must meet its certificate. The pairs that do not reach each other stand in its load,
so that no chain has them as neighbours (`planning/apart`). A server that loses the stream to the next hop of a chain
says so within half a second, and then asks whether the two reach each other after all.
"""

import asyncio
import logging
import random
import zlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import Peer
from corolla.chassis.errors import CorollaError, MalformedMessage
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Frame
from corolla.wire.stream import Connect, Receiver, Stream

log = logging.getLogger(__name__)

MOST_ASKED: Final = 16
"""The most servers that one asks; in a larger fleet, they are spread evenly over it."""
_MOST_ANSWERED: Final = 16
"""The most servers that one connects to at a time. It ignores others that ask, and they give up waiting soon."""
_MAX_ADDRESS_CHARS: Final = 512
_CONNECT_S: Final = 1.5
_LOOK_UP_S: Final = 1.0
_ANSWER_S: Final = _LOOK_UP_S + _CONNECT_S
AGAIN_S: Final = 2.0
LOOK_INTERVAL_S: Final = 10.0
MOST_UNREACHABLE: Final = 64
"""The most servers that a load names."""
MOST_LOST: Final = 4
"""More servers that are lost at the same time are not apart from this one: they died, or this one is cut off."""
_LOOK_AFTER_S: Final = 0.5


class Outcome(Enum):
    """How a server answered that was asked to meet this one."""

    MET = auto()
    NOT_MET = auto()
    SILENT = auto()
    """It was reached, and said neither in time: it is busy, or of a release that does not know the question."""
    NOT_REACHED = auto()


@dataclass(eq=False, repr=False)
class Meetings:
    """Asks the servers of the placement, and answers those that ask.

    Args:
        address: this server's `host:port`, as the placement names it.
        fingerprint: the weights and protocol of this server.
        placement: asks a router for all servers. May raise CorollaError.
        report: tells a router that this server does not reach the one with an id. May raise CorollaError.
        on_change: is called when `unreachable` has changed.

    Attributes:
        unreachable: the addresses of servers that do not reach this one, or that it does not reach.
    """

    address: str
    fingerprint: str
    neighbours: Neighbours
    connect: Connect
    placement: Callable[[], Awaitable[Sequence[router_pb2.PlacedServer]]]
    tasks: TaskGroup
    report: Callable[[str], Awaitable[None]]
    on_change: Callable[[], None]
    unreachable: tuple[str, ...] = ()
    _answering: set[Peer] = field(init=False, default_factory=set)
    _lost: set[str] = field(init=False, default_factory=set)
    # The ids of the other servers of the placement that was seen last, and of those in `unreachable`, by address.
    _ids: dict[str, str] = field(init=False, default_factory=dict)
    _unreachable_ids: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.neighbours.on_placement = self._see

    async def meet_all(self) -> None:
        """Returns once one of the ready servers has met this one, or all that it reaches are silent, or there is none.

        If it reaches none, it goes on asking: those that are dead leave the placement when their leases end.
        """
        has_logged = False
        while True:
            ready = await self._ready() or {}
            self._note(gone=set(self.unreachable).difference(ready))
            outcomes = set(await self._ask(self._some_of(sorted(ready))))
            has_failed = Outcome.NOT_MET in outcomes or outcomes == {Outcome.NOT_REACHED}
            if Outcome.MET in outcomes or not has_failed:
                return
            if not has_logged:
                log.warning(
                    "no other block server reaches this one; open its port for them and theirs for it, or name an "
                    "address that they reach (COROLLA_ADVERTISED_HOST, or --host of `corolla join`)",
                    extra={"address": self.address},
                )
            has_logged = True
            await asyncio.sleep(AGAIN_S)

    async def run(self) -> None:
        """Asks again and again those that did not reach this server, for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            if self.unreachable and (ready := await self._ready()) is not None:
                self._note(gone=set(self.unreachable).difference(ready))
                await self._ask(sorted(self.unreachable))

    def lost(self, address: str) -> None:
        """Notes that the stream to a server broke, or that no stream to it could be opened."""
        if not self._lost:
            self.tasks.start(self._look_at_lost(), "lost neighbours")
        self._lost.add(address)

    def answer(self, message: pb.Meet, peer: Peer) -> None:
        """Connects to a server that asks, and tells it whether that worked."""
        if peer.client_id or len(message.address) > _MAX_ADDRESS_CHARS:
            raise MalformedMessage("meet", "must come from a block server, with its address")
        if peer in self._answering or len(self._answering) >= _MOST_ANSWERED:
            return
        self._answering.add(peer)
        self.tasks.start(self._answer(message.address, peer), "meeting")

    async def _look_at_lost(self) -> None:
        """Tells a router of servers that were lost, and asks whether they reach this one after all."""
        # All that lose the same neighbour do not call a router at the same moment, and none asks for the placement.
        await asyncio.sleep(random.uniform(0, _LOOK_AFTER_S))
        lost, self._lost = self._lost.difference(self.unreachable), set()
        if not 0 < len(lost) <= MOST_LOST:
            return
        found = {address: self._ids[address] for address in sorted(lost) if address in self._ids}
        self._note(failed=found)
        for server_id in found.values():
            with suppress(CorollaError):
                await self.report(server_id)
        await self._ask(list(found))

    async def _ready(self) -> dict[str, str] | None:
        """The ids of the other ready servers with these weights, by address; None: no router answers."""
        try:
            servers = await self.placement()
        except CorollaError:
            return None
        self._see(servers)
        ready = {each.server.address for each in servers if each.state == router_pb2.SERVER_STATE_READY}
        return {address: server_id for address, server_id in self._ids.items() if address in ready}

    def _see(self, servers: Sequence[router_pb2.PlacedServer]) -> None:
        """Notes the servers of a placement. One that came to the address of an unreachable one is not that one."""
        self._ids = {
            each.server.address: each.server.server_id
            for each in servers
            if each.state != router_pb2.SERVER_STATE_DRAINING
            and each.server.fingerprint == self.fingerprint
            and each.server.address != self.address
        }
        before = self._unreachable_ids
        self._note(gone={address for address in before if self._ids.get(address, before[address]) != before[address]})

    def _some_of(self, ready: list[str]) -> list[str]:
        # Servers that join together begin at different places, so that they do not all ask the same ones.
        stride = -(-len(ready) // MOST_ASKED) or 1
        return ready[zlib.crc32(self.address.encode()) % stride :: stride]

    async def _ask(self, addresses: Sequence[str]) -> list[Outcome]:
        """Asks these servers, and notes those that did not meet this one."""
        outcomes = await asyncio.gather(*map(self._met_by, addresses))
        asked = zip(addresses, outcomes, strict=True)
        failed = {address for address, outcome in asked if outcome in (Outcome.NOT_MET, Outcome.NOT_REACHED)}
        self._note(failed=failed, gone=set(addresses) - failed)
        return outcomes

    def _note(self, *, failed: Collection[str] = (), gone: Collection[str] = ()) -> None:
        """Notes which servers do not reach this one, and which do or are there no longer."""
        found = [each for each in self.unreachable if each not in gone]
        found += sorted(each for each in failed if each not in found)
        known = self._unreachable_ids | {each: self._ids[each] for each in failed if each in self._ids}
        self._unreachable_ids = {each: known[each] for each in found[-MOST_UNREACHABLE:] if each in known}
        if (newest := tuple(found[-MOST_UNREACHABLE:])) != self.unreachable:
            self.unreachable = newest
            self.on_change()

    async def _met_by(self, address: str) -> Outcome:
        answer, outcome = asyncio.get_running_loop().create_future(), Outcome.NOT_REACHED

        def receive(frame: Frame) -> None:
            nonlocal outcome
            match frame.control:
                case pb.Welcome():
                    outcome = Outcome.SILENT
                case pb.Met(met=met) if not answer.done():
                    outcome = Outcome.MET if met else Outcome.NOT_MET
                    answer.set_result(None)

        stream = self._greeted(address, receive)
        stream.send(pb.Meet(address=self.address))
        await _first(answer, stream, _ANSWER_S)
        return outcome

    async def _answer(self, address: str, peer: Peer) -> None:
        welcome = asyncio.get_running_loop().create_future()

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Welcome) and not welcome.done():
                welcome.set_result(None)

        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_UP_S):
                    await self.neighbours.finds(address)
            # Otherwise anybody could have this server connect anywhere.
            if not self.neighbours.has_address(address):
                return
            stream = self._greeted(address, receive)
            await _first(welcome, stream, _CONNECT_S)
            has_met = welcome.done() and stream.peer == peer.workload
            peer.send(pb.Met(met=has_met))
            if has_met:
                self._note(gone={address})
        finally:
            self._answering.discard(peer)

    def _greeted(self, address: str, receive: Receiver) -> Stream:
        stream = self.connect(address, lambda _: receive)
        stream.send(pb.Hello(fingerprint=self.fingerprint))
        return stream


async def _first(answer: "asyncio.Future[Any]", stream: Stream, timeout_s: float) -> None:
    """Waits for an answer, the end of the stream or the end of the time, and closes the stream."""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({answer, stream.ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stream.close()
