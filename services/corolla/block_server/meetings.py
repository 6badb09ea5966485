"""Has other block servers connect to this one, so that it knows before it is ready whether they reach it.

A chain may lead from any server to any other one. So a server that has loaded its span asks those that are ready to
connect to its address, where they must meet its certificate. The pairs that do not reach each other stand in its load.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import Peer
from corolla.chassis.errors import CorollaError, MalformedMessage
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Frame
from corolla.wire.stream import Connect, Receiver, Stream

log = logging.getLogger(__name__)

MOST_ASKED: Final = 64
"""If there are more servers, so many are asked, spread evenly over all of them."""
_MOST_ANSWERED: Final = 16
"""So many servers are connected to at a time; further ones get no answer, and do not wait for it."""
_MAX_ADDRESS_CHARS: Final = 512
_CONNECT_S: Final = 1.5
_ANSWER_S: Final = 2.5
AGAIN_S: Final = 2.0
_LOOK_INTERVAL_S: Final = 10.0


@dataclass(eq=False, repr=False)
class Meetings:
    """Asks the servers of the placement, and answers those that ask.

    Args:
        address: this server's `host:port`, as the placement names it.
        fingerprint: the weights and protocol of this server.
        placement: asks a router for all servers. May raise CorollaError.

    Attributes:
        unreachable: the addresses of servers that do not reach this one, or that it does not reach.
    """

    address: str
    fingerprint: str
    neighbours: Neighbours
    connect: Connect
    placement: Callable[[], Awaitable[Sequence[router_pb2.PlacedServer]]]
    tasks: TaskGroup
    unreachable: tuple[str, ...] = ()
    _num_answering: int = field(init=False, default=0)

    async def meet_all(self) -> None:
        """Returns once the ready servers were asked, and some reached this one if any of them tried.

        A server that does not answer may be about to leave the placement, so it holds up no other one.
        """
        has_logged = False
        while True:
            with_answer = await self._ask(await self._ready())
            if any(with_answer) or not with_answer:
                return
            if not has_logged:
                log.warning(
                    "no other block server reaches this one; open its port for them, or name an address that they "
                    "reach (COROLLA_ADVERTISED_HOST, or --host of `corolla join`)",
                    extra={"address": self.address},
                )
            has_logged = True
            await asyncio.sleep(AGAIN_S)

    async def run(self) -> None:
        """Asks again and again those that did not reach this server, for ever."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if self.unreachable:
                await self._ask([each for each in await self._ready() if each in self.unreachable])

    def answer(self, message: pb.Meet, peer: Peer) -> None:
        """Connects to a server that asks, and tells it whether that worked."""
        if peer.client_id or len(message.address) > _MAX_ADDRESS_CHARS:
            raise MalformedMessage("meet", "must come from a block server, with its address")
        if self._num_answering >= _MOST_ANSWERED:
            return

        def then(_was_answered: bool) -> None:
            # Otherwise anybody could have this server connect anywhere.
            if self.neighbours.has_address(message.address):
                self.tasks.start(self._answer(message.address, peer), "meeting")

        if self.neighbours.has_address(message.address):
            then(True)
        else:
            self.neighbours.look_again(then)

    async def _ready(self) -> list[str]:
        """The addresses of the other ready servers with these weights; none while no router answers."""
        try:
            servers = await self.placement()
        except CorollaError:
            return []
        ready = sorted(
            each.server.address
            for each in servers
            if each.state == router_pb2.SERVER_STATE_READY
            and each.server.fingerprint == self.fingerprint
            and each.server.address != self.address
        )
        return ready[:: -(-len(ready) // MOST_ASKED)] if ready else []

    async def _ask(self, addresses: Sequence[str]) -> list[bool]:
        """Asks these servers, and notes those that are not reached. Returns the answers that came."""
        answers = await asyncio.gather(*map(self._met_by, addresses))
        self.unreachable = tuple(address for address, met in zip(addresses, answers, strict=True) if not met)
        return [met for met in answers if met is not None]

    async def _met_by(self, address: str) -> bool | None:
        """Whether the server at an address met this one; None: it does not answer."""
        answer = asyncio.get_running_loop().create_future()

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Met) and not answer.done():
                answer.set_result(frame.control.met)

        stream = self._greeted(address, receive)
        stream.send(pb.Meet(address=self.address))
        await _first(answer, stream, _ANSWER_S)
        return answer.result() if answer.done() else None

    async def _answer(self, address: str, peer: Peer) -> None:
        welcome = asyncio.get_running_loop().create_future()

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Welcome) and not welcome.done():
                welcome.set_result(None)

        self._num_answering += 1
        try:
            stream = self._greeted(address, receive)
            await _first(welcome, stream, _CONNECT_S)
            peer.send(pb.Met(met=welcome.done() and stream.peer == peer.workload))
        finally:
            self._num_answering -= 1

    def _greeted(self, address: str, receive: Receiver) -> Stream:
        stream = self.connect(address, lambda _: receive)
        stream.send(pb.Hello(fingerprint=self.fingerprint))
        return stream


async def _first(answer: "asyncio.Future[bool] | asyncio.Future[None]", stream: Stream, timeout_s: float) -> None:
    """Waits for an answer, the end of the stream or the end of the time, and closes the stream."""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({answer, stream.ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stream.close()
