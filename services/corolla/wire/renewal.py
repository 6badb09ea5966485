"""The caller's end of streams that live longer than the certificates with which they were opened.

Once either end has a new certificate, the caller opens another connection, and the old one drains:

    caller                                 server
                         <-- old --        GoAway, unless it is the caller's certificate that has changed
        Hello            -- new -->        with the stream id of the old one
                         <-- new --        Welcome
        GoAway, is_last  -- old -->        the server's next frames come on the new one
                         <-- old --        GoAway, is_last

Until the server's last frame on the old connection has come, the caller's frames wait for the new connection, and the
frames that arrived there wait, too. So no frame is lost, and none overtakes another. If no new connection succeeds, the
stream stays on the old one until its certificates end.
"""

import asyncio
import copy
import logging
import secrets
from functools import partial
from typing import Final

from google.protobuf.message import Message

from corolla.chassis.errors import CorollaError, MalformedMessage, QueueFull, RoleDenied
from corolla.trust.workload import Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire import stream as streams
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import FrameStream, Stream, StreamCause, StreamEnd

log = logging.getLogger(__name__)

_ATTEMPT_INTERVAL_S: Final = 2.0
"""The shortest time between two attempts to open another connection, however often a server asks."""
_FRAME_BYTES: Final = 256
"""The bytes that a waiting frame counts in addition to its control part and payload."""


class RenewedStream:
    """A `Stream` that moves to another connection when certificates change, if its first frame is Hello."""

    def __init__(
        self,
        address: str,
        accept: streams.Accept,
        limits: streams.StreamLimits | None = None,
        *,
        trust: streams.StreamTrust,
    ) -> None:
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self._address = address
        self._limits = limits or streams.between_servers()
        self._trust = trust
        self._hello, self._welcome = pb.Hello(), pb.Welcome()
        self._next: FrameStream | None = None
        self._next_attempt_s = 0.0
        # Whether the caller has sent its last frame on the old connection, and the server's last one has not come.
        self._is_leaving = False
        self._unsent: list[Frame] = []
        self._untaken: list[Frame] = []
        self._num_waiting_bytes = 0

        def accept_first(_: Stream) -> streams.Receiver:
            self._receiver = accept(self)
            return partial(self._receive, self._current)

        self._current = self._begin(accept_first)

    @property
    def peer(self) -> Workload | None:
        return self._current.peer

    @property
    def heard_s(self) -> float:
        return max(connection.heard_s for connection in self._connections())

    @property
    def num_waiting_bytes(self) -> int:
        return self._num_waiting_bytes + sum(connection.num_waiting_bytes for connection in self._connections())

    def send(self, control: Message, payload: Buffer = b"") -> None:
        if isinstance(control, pb.Hello):
            self._hello.CopyFrom(control)
            self._hello.stream_id = secrets.token_bytes(16)
            control = self._hello
        if self._is_leaving:
            self._wait(self._unsent, Frame(copy.deepcopy(control), payload))
        else:
            self._current.send(control, payload)

    def close(self) -> None:
        for connection in self._connections():
            connection.close()

    def fail(self, error: CorollaError) -> None:
        for connection in self._connections():
            connection.fail(error)

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        for connection in self._connections():
            connection.abort(cause)

    def _begin(self, accept: streams.Accept) -> FrameStream:
        connection = streams.connect(self._address, accept, self._limits, trust=self._trust, on_outdated=self._renew)
        connection.ended.add_done_callback(lambda ended: self._on_ended(connection, ended.result()))
        return connection

    def _renew(self) -> None:
        """Begins another connection after a change of certificates, unless one exists or was tried a moment ago."""
        now_s = asyncio.get_running_loop().time()
        if not self._welcome.takes_stream_ids or self._next is not None or now_s < self._next_attempt_s:
            return
        self._next_attempt_s = now_s + _ATTEMPT_INTERVAL_S

        def accept_next(connection: Stream) -> streams.Receiver:
            connection.send(self._hello)
            return partial(self._receive, connection)

        self._next = self._begin(accept_next)

    def _receive(self, connection: Stream, frame: Frame) -> None:
        if connection is self._current:
            self._take(frame)
        elif self._is_leaving:
            self._wait(self._untaken, Frame(frame.control, bytes(frame.payload)))
        elif frame.control == self._welcome and connection.peer == self.peer:
            self._current.send(pb.GoAway(is_last=True))
            self._is_leaving = True
        else:
            raise RoleDenied("a stream cannot move to a server with another identity")

    def _take(self, frame: Frame) -> None:
        match frame.control:
            case pb.GoAway(is_last=True):
                self._go_over()
            case pb.GoAway():
                self._renew()
            case pb.Welcome():
                self._welcome.CopyFrom(frame.control)
                self._receiver(frame)
            case _:
                self._receiver(frame)

    def _go_over(self) -> None:
        if self._next is None or not self._is_leaving:
            raise MalformedMessage("go_away", "must not come before the caller has left the old connection")
        before, self._current, self._next, self._is_leaving = self._current, self._next, None, False
        unsent, self._unsent, untaken, self._untaken = self._unsent, [], self._untaken, []
        self._num_waiting_bytes = 0
        before.close()
        try:
            for frame in unsent:
                self._current.send(*frame)
            for frame in untaken:
                self._take(frame)
        except Exception:
            self.abort()
            raise

    def _wait(self, waiting: list[Frame], frame: Frame) -> None:
        """Adds a frame to those that wait for the move. Raises QueueFull if too many bytes wait already."""
        self._num_waiting_bytes += _FRAME_BYTES + frame.control.ByteSize() + len(frame.payload)
        if self._num_waiting_bytes > self._limits.max_waiting_bytes:
            raise QueueFull("too many bytes waited while a stream moved to another connection")
        waiting.append(frame)

    def _connections(self) -> list[FrameStream]:
        return [self._current] if self._next is None else [self._current, self._next]

    def _on_ended(self, connection: FrameStream, end: StreamEnd) -> None:
        """Ends the stream with its connection; the next connection ends it only once the stream has left this one."""
        if connection is self._next and not self._is_leaving:
            self._next = None
            if end.cause is not StreamCause.CLOSED:
                facts = {"address": self._address, "cause": end.cause.value}
                log.warning("could not open a new connection for a stream; trying again", extra=facts)
        elif connection in self._connections() and not self.ended.done():
            self.ended.set_result(end)
            self.close()
