"""Streams to other hops: outputs and rings' rows go directly to the server that continues with them.

A next hop does not acknowledge steps, so when the stream breaks this hop cannot know which steps were lost. It sends
faults for all recent steps to their clients, which ignore the faults of steps that were answered.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import PeerTable
from corolla.chassis.errors import HopUnavailable, QueueFull, RouteUnknown
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import Connect, Stream, StreamCause, connect

log = logging.getLogger(__name__)

_NUM_REMEMBERED: Final = 1024
_REMEMBERED_S: Final = 60.0
MAX_UNSENT_BYTES: Final = 128 << 20
"""The most bytes that wait while a router is asked about their addresses, since a sender may invent many addresses."""


@dataclass(slots=True)
class _Link:
    """A stream to one hop, and the times and headers of the steps that were sent on it recently."""

    stream: Stream
    sent: deque[tuple[float, pb.Step | pb.Next]] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))


@dataclass(eq=False, repr=False)
class Relay:
    """Keeps one stream per hop, which it opens at first use and again after it broke.

    Args:
        first_hop: takes a Next if this server is the first hop of its ring.
        connect: begins streams to other hops.
        neighbours: knows the addresses that may be connected to; None allows every address.
        on_lost: is called with the address of a hop whose stream broke or could not be opened.
    """

    fingerprint: str
    peers: PeerTable
    first_hop: Callable[[pb.Next], None]
    connect: Connect = connect
    clock: Callable[[], float] = time.monotonic
    neighbours: Neighbours | None = None
    on_lost: Callable[[str], None] = lambda address: None
    _links: dict[str, _Link] = field(init=False, default_factory=dict)
    # Steps for addresses that a router is being asked about.
    _unsent: dict[str, list[tuple[pb.Step | pb.Next, Buffer]]] = field(init=False, default_factory=dict)

    def send(self, address: str, step: pb.Step | pb.Next, payload: Buffer = b"") -> None:
        """Queues a step for another hop; if that hop cannot be reached, the clients of the step get a fault."""
        link = self._links.get(address)
        if link is None:
            if self._waits_for_router(address, step, payload):
                return
            link = self._links[address] = self._begin(address)
        try:
            link.stream.send(step, payload)
        except QueueFull:
            self._lose(step, step.rows, _unreachable(address))
            return
        link.sent.append((self.clock(), step))

    def send_next(self, first_block: int, address: str, message: pb.Next) -> None:
        """Sends the next rows of a ring to its first hop, which is this server if its blocks begin at 0."""
        if first_block == 0:
            self.first_hop(message)
        else:
            self.send(address, message)

    def give_up(self, step: pb.Step) -> None:
        """Tells the first hop that no row of its microbatch comes round. Any hop of the ring may call this."""
        if step.ring.microbatch:
            self.send_next(step.blocks.start, step.ring.first_address, pb.Next(microbatch=step.ring.microbatch))

    def close(self) -> None:
        for link in self._links.values():
            link.stream.close()

    def _waits_for_router(self, address: str, step: pb.Step | pb.Next, payload: Buffer) -> bool:
        """Keeps a step while a router is asked about its address, or refuses the step if too much waits already.

        Returns False, and does neither, if the placement is known to name the address.
        """
        unsent = self._unsent.get(address)
        if unsent is None and (self.neighbours is None or self.neighbours.has_address(address)):
            return False
        sizes = [len(each) for steps in self._unsent.values() for _, each in steps]
        if len(sizes) >= _NUM_REMEMBERED or sum(sizes) + len(payload) > MAX_UNSENT_BYTES:
            self._refuse(step, address)
            return True
        if unsent is None and self.neighbours is not None:
            unsent = self._unsent[address] = []
            self.neighbours.look_again(lambda was_answered: self._on_asked(address, was_answered))
        if unsent is not None:
            unsent.append((step, payload))
        return True

    def _on_asked(self, address: str, was_answered: bool) -> None:
        neighbours = self.neighbours
        for step, payload in self._unsent.pop(address):
            # While routers are away, client services still plan by the newest placement that they have. So an address
            # in a client service's step counts as named.
            if neighbours is not None and not was_answered and self.peers.are_client_services(step):
                neighbours.take(address)
            if neighbours is None or neighbours.has_address(address):
                self.send(address, step, payload)
            else:
                log.warning("a step names a next hop that is not in the placement", extra={"address": address})
                self._refuse(step, address)

    def _refuse(self, step: pb.Step | pb.Next, address: str) -> None:
        self._lose(step, step.rows, RouteUnknown("a step names a next hop that is not in the placement", address))

    def _begin(self, address: str) -> _Link:
        link = _Link(self.connect(address, lambda _: self._receive))
        link.stream.send(pb.Hello(fingerprint=self.fingerprint))
        link.stream.ended.add_done_callback(lambda _: self._on_ended(address, link))
        return link

    def _receive(self, frame: Frame) -> None:
        """Passes a fault on to its client. The next hop sends it here only if it has no stream from the client."""
        if isinstance(frame.control, pb.Fault):
            peer = self.peers.get(frame.control.client_id)
            if peer is not None:
                peer.send(frame.control)

    def _on_ended(self, address: str, link: _Link) -> None:
        end = link.stream.ended.result()
        if end.cause is not StreamCause.CLOSED:
            log.warning("the stream to the next hop broke", extra={"address": address, "cause": end.cause.value})
        if end.cause in (StreamCause.LOST, StreamCause.SILENT):
            self.on_lost(address)
        if self._links.get(address) is link:
            del self._links[address]
        oldest_s = self.clock() - _REMEMBERED_S
        seen: set[tuple[bytes, int]] = set()
        for sent_s, step in reversed(link.sent):
            if sent_s <= oldest_s:
                return
            if isinstance(step, pb.Step) and not step.HasField("ring"):
                self._lose(step, (), _unreachable(address))
                continue
            # A session of a ring has only its newest step under way.
            newest = [row for row in step.rows if (row.session_id, row.epoch) not in seen]
            seen.update((row.session_id, row.epoch) for row in newest)
            if newest:
                self._lose(step, newest, _unreachable(address))

    def _lose(self, step: pb.Step | pb.Next, rows: Iterable[pb.StepRow], error: HopUnavailable) -> None:
        """Reports that rows of a step may not arrive; an empty `rows` means all rows of a client's step."""
        self.peers.send_faults(step, error, rows)
        if isinstance(step, pb.Step):
            self.give_up(step)


def _unreachable(address: str) -> HopUnavailable:
    return HopUnavailable("a hop of the chain is not reachable", address)
