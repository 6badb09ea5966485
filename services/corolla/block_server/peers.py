"""The streams that callers keep open to this server."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.message import Message
from prometheus_client import Counter

from corolla.chassis.errors import CorollaError, HopUnavailable, MalformedMessage, PositionGap, QueueFull
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.stream import Stream

_numbers: Final = itertools.count(1)


class Peer:
    """The stream of one caller: a client service, or an upstream hop, which has no client id.

    When certificates change, the stream moves to another connection (`wire/renewal`).

    Args:
        stream_id: the id by which the caller names the stream on the other connection; empty if it never moves.

    Attributes:
        workload: the identity of the other end; None without mutual TLS.
    """

    def __init__(self, client_id: bytes, stream: Stream, stream_id: bytes = b"") -> None:
        self.client_id = client_id
        self.stream_id = stream_id
        self.workload = stream.peer
        self.number = next(_numbers)
        self._stream = stream
        self._next: Stream | None = None

    @property
    def owner(self) -> str:
        """The owner of the sessions that the peer opens; empty without mutual TLS."""
        return self.workload.owner if self.workload is not None else ""

    @property
    def name(self) -> str:
        """The exact identity of the peer; empty without mutual TLS."""
        return str(self.workload) if self.workload is not None else ""

    @property
    def num_waiting_bytes(self) -> int:
        """The bytes that wait in this process until the peer takes them."""
        return self._stream.num_waiting_bytes

    def send(self, control: Message, payload: Buffer = b"") -> None:
        """Sends a frame. A peer that does not read loses its stream, so that it cannot fill this server's memory."""
        try:
            self._stream.send(control, payload)
        except QueueFull as error:
            self._stream.fail(error)

    def expect(self, following: Stream) -> None:
        """Notes the connection to which the caller is going to move the stream."""
        self._next = following

    def go_over(self) -> None:
        """Moves the stream, after the caller has sent its last frame on the present connection."""
        if self._next is None:
            raise MalformedMessage("go_away", "must be sent only after the caller has opened the next connection")
        self.send(pb.GoAway(is_last=True))
        self._stream, self._next = self._next, None

    def lose(self, stream: Stream) -> bool:
        """Notes that one of its connections has ended. Returns whether the stream has ended with it."""
        if stream is not self._stream:
            self._next = None if stream is self._next else self._next
            return False
        if self._next is not None:
            self._next.abort()
        return True


class PeerTable:
    """Finds client services by client id, and all callers by stream id.

    A client uses one stream at a time. But a server may notice late that a stream has begun or ended, so it may know
    several streams of a client; then `get` returns the newest one.
    """

    def __init__(self) -> None:
        self._streams: dict[bytes, list[Peer]] = {}
        self._by_stream_id: dict[bytes, Peer] = {}

    def add(self, peer: Peer) -> None:
        if peer.stream_id:
            self._by_stream_id[peer.stream_id] = peer
        if peer.client_id:
            self._streams.setdefault(peer.client_id, []).append(peer)

    def remove(self, peer: Peer) -> None:
        self._by_stream_id.pop(peer.stream_id, None)
        streams = self._streams.get(peer.client_id, [])
        if peer in streams:
            streams.remove(peer)
            if not streams:
                del self._streams[peer.client_id]

    def get(self, client_id: bytes) -> Peer | None:
        streams = self._streams.get(client_id)
        return streams[-1] if streams else None

    def numbers(self, client_id: bytes) -> frozenset[int]:
        """The numbers of all streams of the client."""
        return frozenset(peer.number for peer in self._streams.get(client_id, []))

    def named(self, stream_id: bytes) -> Peer | None:
        """The peer whose stream has this id."""
        return self._by_stream_id.get(stream_id)

    def are_client_services(self, step: pb.Step | pb.Next) -> bool:
        """All clients of a step have streams here and, with mutual TLS, have the role of client services."""
        peers = [self.get(client_id) for client_id in rows_by_client(step, step.rows)]
        return bool(peers) and all(
            peer is not None and (peer.workload is None or peer.workload.role is Role.CLIENT) for peer in peers
        )

    def send_faults(
        self, step: pb.Step | pb.Next, error: CorollaError, rows: Iterable[pb.StepRow], sender: Peer | None = None
    ) -> None:
        """Tells the clients of a step why rows fail; `sender` gets the fault of a client that has no stream here."""
        for client_id, its_rows in rows_by_client(step, rows).items():
            recipient = self.get(client_id) or sender
            if recipient is not None:
                recipient.send(step_fault(step, error, its_rows, client_id))


class StepFaults:
    """Sends the faults of steps that this server does not compute, and counts their rows by reason."""

    def __init__(self, peers: PeerTable, counter: Counter) -> None:
        self._peers = peers
        self._counter = counter

    def send(
        self, step: pb.Step | pb.Next, error: CorollaError, rows: Sequence[pb.StepRow], sender: Peer | None = None
    ) -> None:
        """See `PeerTable.send_faults`."""
        self._counter.labels(error.reason).inc(len(rows))
        self._peers.send_faults(step, error, rows, sender)


def rows_by_client(step: pb.Step | pb.Next, rows: Iterable[pb.StepRow]) -> dict[bytes, list[pb.StepRow]]:
    """The rows of a step, grouped by their clients' ids."""
    step_client_id = step.client_id if isinstance(step, pb.Step) else b""
    if step_client_id:
        return {step_client_id: list(rows)}
    by_client: dict[bytes, list[pb.StepRow]] = {}
    for row in rows:
        by_client.setdefault(row.client_id, []).append(row)
    return by_client


def step_fault(step: pb.Step | pb.Next, error: CorollaError, rows: Iterable[pb.StepRow], client_id: bytes) -> pb.Fault:
    """The fault frame that tells a client why rows of a step failed."""
    step_id = step.step_id if isinstance(step, pb.Step) else 0
    return fill_fault(pb.Fault(step_id=step_id, client_id=client_id, rows=rows), error)


def fill_fault(fault: pb.Fault, error: CorollaError) -> pb.Fault:
    """Writes the reason, message and metadata of an error into a fault, and returns the fault."""
    fault.reason = error.reason
    fault.message = error.message
    fault.metadata.update(error.metadata)
    if isinstance(error, PositionGap):
        fault.metadata["num_cached_tokens"] = str(error.held)
    if isinstance(error, HopUnavailable):
        fault.address = error.address
    return fault
