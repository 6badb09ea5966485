"""Streams that live longer than the certificates they were opened with.

Once either end has other certificates, the stream goes on over another connection: the new one first, then the old one
goes. No frame is lost, and none overtakes another.

    caller                                        server
        Renew {}                 -- old -->       unless the server's own certificates have changed
                                 <-- old --       Renew {ticket}
        Continue {ticket}        -- new -->
                                 <-- old --       Continue {}, the server's last frame there: it writes to the new one
        Continue {}              -- old -->       the caller's last frame there; the server closes the old one

What comes on the new connection waits until the old one has brought all. Where the new one does not come about, the old
one stays, and the caller tries again; ever more seldom where one end refuses the other.
"""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol, cast

from google.protobuf.message import Message

from corolla.chassis.errors import CorollaError, MalformedMessage, QueueFull, RoleDenied
from corolla.trust.renewals import Renewals
from corolla.trust.workload import Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import Accept, FrameStream, Receiver, Stream, StreamCause, StreamEnd, StreamLimits

log = logging.getLogger(__name__)

_TICKET_BYTES: Final = 16
_RETRY_INTERVAL_S: Final = 1.0
_MAX_RETRY_INTERVAL_S: Final = 30.0
"""It doubles up to this where one end refuses the other, which each of them may write to its audit log."""
MAX_EARLY_BYTES: Final = 64 << 20
"""That wait on a new connection until the old one has brought all; with more, that one is not read meanwhile."""
_EARLY_FRAME_BYTES: Final = 256
"""What a frame that waits takes in addition to its parts."""
NUM_STALLED_LOOKS: Final = 60
"""Of `Renewals`, in a row: if the old connection brings next to nothing meanwhile, what waits for it waits no more."""
_STALLED_BYTES: Final = 4096
"""More than the pings and their answers of so many looks."""

_OF_RENEWALS: Final = (pb.Renew, pb.Continue)


class ConnectOnce(Protocol):
    """What begins one connection, with the certificates of now."""

    def __call__(self, address: str, accept: Accept, limits: StreamLimits | None = None) -> FrameStream: ...


class RenewedStreams:
    """All renewed streams of one process.

    Args:
        connect: begins a connection.
        certificate: gives that which such a connection shows, and one that is taken.
        renewals: of the process.
    """

    def __init__(self, connect: ConnectOnce, certificate: Callable[[], bytes], renewals: Renewals) -> None:
        self._connect = connect
        self._certificate = certificate
        self._renewals = renewals
        self._offered: dict[bytes, _TakenStream] = {}

    def connect(self, address: str, accept: Accept, limits: StreamLimits | None = None) -> Stream:
        """A stream to `host:port`; see `Connect`."""
        stream = _BegunStream(address, accept, limits, self._connect, self._certificate)
        self._keep(stream)
        return stream

    def accepting(self, accept: Accept) -> Accept:
        """For a listener: takes connections, and calls `accept` with streams."""

        def accept_connection(opened: Stream) -> Receiver:
            connection = cast(FrameStream, opened)
            stream = _TakenStream(connection, self._certificate, self._offered)
            stream.receiver = accept(stream)
            is_first = True

            def receive(frame: Frame) -> None:
                nonlocal stream, is_first
                if is_first:
                    is_first = False
                    if isinstance(frame.control, pb.Continue):
                        stream = self._continued(frame.control, connection, stream)
                        return
                    # Not before: to a connection that continues another stream, this one must offer nothing.
                    self._keep(stream)
                stream.receive(connection, frame)

            return receive

        return accept_connection

    def _continued(self, control: pb.Continue, connection: FrameStream, unused: "_TakenStream") -> "_TakenStream":
        stream = self._offered.get(control.ticket)
        if stream is None:
            raise MalformedMessage("ticket", "is of no stream that is to go on here")
        if stream.peer != connection.peer:
            raise RoleDenied("the stream that is to go on here is another's")
        stream.go_over(connection)
        unused.dissolve()
        return stream

    def _keep(self, stream: "_RenewedStream") -> None:
        self._renewals.add(stream)
        stream.ended.add_done_callback(lambda _: self._renewals.discard(stream))


class _RenewedStream(ABC):
    """One end of a stream. `_next` is the connection that continues it or was to, while the old one has its turn.

    It ends with the connection that it reads. Where the next one has ended before its turn, the stream still takes what
    both have brought, and ends as that one did.
    """

    def __init__(self, certificate: Callable[[], bytes]) -> None:
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self.receiver: Receiver | None = None
        self._certificate = certificate
        self._current: FrameStream
        self._writer: FrameStream
        self._next: FrameStream | None = None
        self._early: list[Frame] = []
        self._num_early_bytes = 0
        self._num_moved_bytes = 0
        self._num_stalled_looks = 0

    @property
    def peer(self) -> Workload | None:
        return self._current.peer

    def send(self, control: Message, payload: Buffer = b"") -> None:
        self._writer.send(control, payload)

    def close(self) -> None:
        for connection in self._connections():
            connection.close()

    def fail(self, error: CorollaError) -> None:
        self._writer.fail(error)
        self.close()

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        for connection in self._connections():
            connection.abort(cause)

    def receive(self, connection: FrameStream, frame: Frame) -> None:
        """Takes a frame of one of its connections."""
        if connection is self._current:
            if isinstance(frame.control, _OF_RENEWALS):
                self._on_renewal(frame.control)
            elif self.receiver is not None:
                self.receiver(frame)
        elif connection is self._next:
            # An empty payload would hold on to all bytes that came with it.
            frame = frame if frame.payload else Frame(frame.control, b"")
            self._num_early_bytes += _EARLY_FRAME_BYTES + frame.control.ByteSize() + len(frame.payload)
            self._early.append(frame)
            if self._num_early_bytes > MAX_EARLY_BYTES:
                connection.pause_reading()

    @abstractmethod
    def renew(self) -> None:
        """See `Renewable`."""

    @abstractmethod
    def _on_renewal(self, control: pb.Renew | pb.Continue) -> None:
        """The other end has sent this on the present connection."""

    @abstractmethod
    def _on_next_ended(self, end: StreamEnd) -> None:
        """The connection has ended that was to continue this stream."""

    def _is_old(self) -> bool:
        """Whether this end has another certificate than the present connection shows."""
        return self._current.certificate != self._certificate()

    def _begin(self, connection: FrameStream) -> None:
        """The stream's first connection."""
        self._current = self._writer = connection
        self._attend(connection)

    def _expect(self, connection: FrameStream) -> None:
        self._next = connection
        self._early, self._num_early_bytes = [], 0
        self._num_moved_bytes, self._num_stalled_looks = self._current.num_moved_bytes(), 0
        self._attend(connection)

    def _has_stalled(self) -> bool:
        """Whether the old connection has for too many looks brought too little that the turn could still come.

        Looks are counted, not seconds: where this process was held up, what came meanwhile may lie unread.
        """
        num_bytes = self._current.num_moved_bytes()
        if num_bytes - self._num_moved_bytes > _STALLED_BYTES:
            self._num_moved_bytes, self._num_stalled_looks = num_bytes, 0
        self._num_stalled_looks += 1
        return self._num_stalled_looks > NUM_STALLED_LOOKS

    def _turn(self) -> FrameStream:
        """The present connection has brought all: the next one takes its place. Returns the one before."""
        if self._next is None:
            raise MalformedMessage("frame", "a stream goes on over a connection that there is not")
        before, self._current, self._next = self._current, self._next, None
        self._writer = self._current
        early, self._early, self._num_early_bytes = self._early, [], 0
        self._current.resume_reading()
        self._current.take(early)
        if self._current.ended.done():
            self._conclude(self._current.ended.result())
        return before

    def _connections(self) -> list[FrameStream]:
        return [self._current] if self._next is None else [self._current, self._next]

    def _attend(self, connection: FrameStream) -> None:
        connection.ended.add_done_callback(lambda ended: self._on_ended(connection, ended.result()))

    def _on_ended(self, connection: FrameStream, end: StreamEnd) -> None:
        if connection is self._current:
            self._conclude(end)
        elif connection is self._next:
            self._on_next_ended(end)

    def _conclude(self, end: StreamEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)
        self.close()


class _BegunStream(_RenewedStream):
    """The end that calls, and opens each connection."""

    def __init__(
        self,
        address: str,
        accept: Accept,
        limits: StreamLimits | None,
        connect: ConnectOnce,
        certificate: Callable[[], bytes],
    ) -> None:
        super().__init__(certificate)
        self._address = address
        self._limits = limits
        self._connect = connect
        # The server has asked for another connection, and there is none yet.
        self._is_asked = False
        self._next_attempt_s = 0.0
        self._retry_interval_s = _RETRY_INTERVAL_S
        # It has brought all, and the server closes it once it has read all.
        self._left: FrameStream | None = None

        def accept_first(connection: Stream) -> Receiver:
            self.receiver = accept(self)
            return self._receiver_of(connection)

        self._begin(connect(address, accept_first, limits))

    def renew(self) -> None:
        if self._next is not None and not self._next.ended.done():
            if self._has_stalled():
                self._next.abort()
            return
        now_s = asyncio.get_running_loop().time()
        if (self._is_asked or self._is_old()) and now_s >= self._next_attempt_s:
            with suppress(QueueFull):  # it is tried again
                self._current.send(pb.Renew())

    def _on_renewal(self, control: pb.Renew | pb.Continue) -> None:
        if isinstance(control, pb.Continue):
            self._current.send(pb.Continue())
            if self._left is not None:  # the server reads what came behind it
                self._left.abort()
            self._left = self._current
            # What waits on the next one may ask again.
            self._is_asked = False
            self._retry_interval_s = _RETRY_INTERVAL_S
            self._turn()
        elif self._next is None or self._next.ended.done():
            self._is_asked = True
            self._open_next(control.ticket)

    def _open_next(self, ticket: bytes) -> None:
        """Unless one has just been opened: a server may not have its callers shake hands without end."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_attempt_s:
            return
        self._next_attempt_s = now_s + self._retry_interval_s

        def accept_next(connection: Stream) -> Receiver:
            if connection.peer != self.peer:
                raise RoleDenied("the server of a stream that is to go on is not the one that it was")
            connection.send(pb.Continue(ticket=ticket))
            return self._receiver_of(connection)

        self._expect(self._connect(self._address, accept_next, self._limits))

    def _connections(self) -> list[FrameStream]:
        return [*super()._connections(), *([] if self._left is None else [self._left])]

    def _on_next_ended(self, end: StreamEnd) -> None:
        if end.cause is StreamCause.FAILED:
            self._retry_interval_s = min(2 * self._retry_interval_s, _MAX_RETRY_INTERVAL_S)
        if end.cause is not StreamCause.CLOSED:
            reason = end.error.reason if end.error is not None else ""
            facts = {"address": self._address, "cause": end.cause.value, "reason": reason}
            log.warning("a stream could not be renewed; it is tried again", extra=facts)

    def _receiver_of(self, connection: Stream) -> Receiver:
        return lambda frame: self.receive(cast(FrameStream, connection), frame)


class _TakenStream(_RenewedStream):
    """The end that was called, and says by what it will know the connection that continues the stream.

    Args:
        offered: streams by their tickets.
    """

    def __init__(
        self, connection: FrameStream, certificate: Callable[[], bytes], offered: dict[bytes, "_TakenStream"]
    ) -> None:
        super().__init__(certificate)
        self._offered = offered
        self._ticket = b""
        self._offered_for = b""
        self._begin(connection)

    def renew(self) -> None:
        if self._next is not None:
            if self._has_stalled():  # there is no way back: this end has said its last on the old connection
                self.abort()
        elif self._is_old() and self._offered_for != self._certificate():
            with suppress(QueueFull):  # it is tried again
                self._offer()

    def go_over(self, connection: FrameStream) -> None:
        """A connection has shown the ticket. Raises QueueFull: the other end does not read what it is sent."""
        self._current.send(pb.Continue())
        self._withdraw()
        self._expect(connection)
        self._writer = connection

    def dissolve(self) -> None:
        """Its only connection was meant for another stream: nothing came of this one."""
        self.ended.set_result(StreamEnd(StreamCause.CLOSED))

    def _on_renewal(self, control: pb.Renew | pb.Continue) -> None:
        if isinstance(control, pb.Continue):
            self._turn().close()
        elif self._next is None:
            self._offer()

    def _offer(self) -> None:
        """Again the same, until it is made use of: the caller may be on its way with it."""
        if not self._ticket:
            self._ticket = secrets.token_bytes(_TICKET_BYTES)
            self._offered[self._ticket] = self
        self._current.send(pb.Renew(ticket=self._ticket))
        self._offered_for = self._certificate()

    def _withdraw(self) -> None:
        self._offered.pop(self._ticket, None)
        self._ticket, self._offered_for = b"", b""

    def _on_next_ended(self, end: StreamEnd) -> None:
        """What was written to one that broke is lost. Where the caller closed it, the old one brings the rest."""
        if end.cause not in (StreamCause.CLOSED, StreamCause.FAILED):
            self._conclude(end)

    def _conclude(self, end: StreamEnd) -> None:
        self._withdraw()
        super()._conclude(end)
