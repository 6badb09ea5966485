"""One connection of the data plane: frames in both directions over TCP, or over TLS if a `StreamTrust` is given.

Each end first sends a greeting of eight bytes: `CRLL`, the version of this layout, and zero, as little-endian numbers
of 16 bits. Frames follow back to back (`wire/frames`). Three kinds of frames belong to the connection itself: Ping and
Pong show that a quiet end still lives, and End says why an end stops. `ended` says how the stream ended, whichever end
stopped it. The listening end sends GoAway while its certificate differs from the one that it showed.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, cast

from google.protobuf.message import Message

from corolla.chassis import audit
from corolla.chassis.acceptor import Acceptor
from corolla.chassis.addresses import host_port, split_address
from corolla.chassis.descriptors import most_connections_of_a_port
from corolla.chassis.errors import (
    CorollaError,
    DeadlineExceeded,
    FingerprintMismatch,
    InternalError,
    MalformedMessage,
    QueueFull,
    RoleDenied,
    StartupError,
    Unauthenticated,
)
from corolla.chassis.handlers import call_path
from corolla.chassis.status import from_reason
from corolla.trust.credentials import Credentials, workload_of_transport
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame, FrameParser, encode

log = logging.getLogger(__name__)

VERSION: Final = 2
_GREETING: Final = struct.Struct("<4sHH")
_MAGIC: Final = b"CRLL"
_COUNT: Final = struct.Struct("i")
MOST_PEERS: Final = 4096
"""The most streams that a port accepts at a time, where the limit of descriptors allows so many."""
_PIECE_BYTES: Final = 256 << 10
_NUM_LOOKS: Final = 8
"""How often a stream checks its other end within the time for which that may be silent."""


class StreamState(Enum):
    """The state of a connection. `CLOSING` takes no more frames and writes those that wait; `ENDED` is final."""

    GREETING = "greeting"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


TRANSITIONS: Final[dict[StreamState, frozenset[StreamState]]] = {
    StreamState.GREETING: frozenset({StreamState.OPEN, StreamState.CLOSING, StreamState.ENDED}),
    StreamState.OPEN: frozenset({StreamState.CLOSING, StreamState.ENDED}),
    StreamState.CLOSING: frozenset({StreamState.ENDED}),
    StreamState.ENDED: frozenset(),
}


class StreamCause(Enum):
    """Why a stream ended."""

    CLOSED = "one end closed it"
    FAILED = "one end found a fault in it"
    LOST = "the connection broke"
    SILENT = "the other end does not answer"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream ended. `error` is the fault that one end found if the cause is `FAILED`, else None."""

    cause: StreamCause
    error: CorollaError | None = None


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of one stream, in seconds and bytes.

    Attributes:
        connect_s: how long the calling end waits for the exchange of greetings; after that, the stream is lost.
        greeting_s: how long the called end waits for the other end's greeting.
        ping_after_s: the silence after which a Ping asks the other end whether it lives.
        silence_s: the silence after which the stream ends; more than `ping_after_s`.
        flush_s: how long a closed stream may still write the frames that wait.
        max_frame_bytes: the most bytes of a frame that comes in.
        max_waiting_bytes: the most bytes that wait to be written because the other end does not read.
    """

    connect_s: float = 3.0
    greeting_s: float = 10.0
    ping_after_s: float = 1.0
    silence_s: float = 2.0
    flush_s: float = 0.5
    max_frame_bytes: int = 64 << 20
    max_waiting_bytes: int = 256 << 20


_CALLER_PING_S: Final = 5.0
_CALLER_SILENCE_S: Final = 10.0

_between_servers = StreamLimits()


def between_servers() -> StreamLimits:
    """Returns the default limits of a stream."""
    return _between_servers


def from_callers() -> StreamLimits:
    """Returns the limits of streams that other processes begin. They allow more silence.

    The system of a dead caller closes its streams, and a caller that is only held up should be able to continue.
    """
    return replace(
        _between_servers, ping_after_s=_CALLER_PING_S, silence_s=max(_CALLER_SILENCE_S, _between_servers.silence_s)
    )


def tolerate_silence(silence_s: float) -> None:
    """Sets how long the other end may be silent, as a default for all streams of this process.

    This is for machines that stop processes for seconds. There it does less harm to notice a frozen process late.
    """
    global _between_servers
    _between_servers = replace(_between_servers, silence_s=silence_s, connect_s=silence_s)


Receiver = Callable[[Frame], None]
"""Handles one frame, at once. If it raises a CorollaError, the other end gets the error and the stream ends."""

Accept = Callable[["Stream"], Receiver]
"""Called with a stream once both ends have greeted each other; returns the function that handles its frames."""


@dataclass(frozen=True, slots=True)
class StreamTrust:
    """TLS credentials, and the roles that the other end may have.

    If the other end's certificate is not valid, the stream ends before any data is read; if it becomes invalid later,
    the stream ends within seconds.

    Attributes:
        roles: the roles that are admitted; with any other role, the stream ends with ROLE_DENIED after the greetings.
    """

    credentials: Credentials
    roles: frozenset[Role]

    def admits(self, peer: Workload | None) -> bool:
        return peer is not None and self.credentials.knows(peer) and peer.role in self.roles


class Stream(Protocol):
    """Either end of a connection, as its users see it.

    Attributes:
        ended: how the stream ended; a future that is done when no more frames are sent or received.
    """

    ended: asyncio.Future[StreamEnd]

    @property
    def heard_s(self) -> float:
        """When bytes last came from the other end, by the event loop's clock."""

    @property
    def peer(self) -> Workload | None:
        """The identity of the other end; None without mutual TLS."""

    @property
    def num_waiting_bytes(self) -> int:
        """The bytes that wait in this process until the other end takes them; 0 once the stream has ended."""

    def send(self, control: Message, payload: Buffer = b"") -> None:
        """Writes a frame as soon as the stream is open. Frames are dropped once it has ended, which `ended` reports.

        Raises:
            QueueFull: too many bytes wait already; nothing of the frame is sent.
        """

    def close(self) -> None:
        """Writes the frames that wait, and ends the stream."""

    def fail(self, error: CorollaError) -> None:
        """Sends the error to the other end, and ends the stream."""

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        """Ends the stream at once, without a message to the other end."""


class Connect(Protocol):
    """A function that begins streams, as `connect` does."""

    def __call__(self, address: str, accept: Accept, limits: StreamLimits | None = None) -> Stream:
        """Begins a stream to `host:port`. If no process answers there, the stream ends as lost."""


class FrameStream(asyncio.BufferedProtocol):
    """A `Stream` over TCP or TLS; `connect` and `StreamListener` make it.

    Args:
        on_outdated: a function that is called repeatedly while this end has a newer certificate than it showed; None:
            the stream sends GoAway instead.

    Attributes:
        peer_address: `host:port` of the other end, for logs.
    """

    def __init__(
        self,
        accept: Accept,
        limits: StreamLimits,
        trust: StreamTrust | None = None,
        on_outdated: Callable[[], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[StreamEnd] = self._loop.create_future()
        self.peer: Workload | None = None
        self.peer_address = ""
        # The certificate that this end shows, or the one before it if the files change just now.
        self._certificate = trust.credentials.certificate if trust is not None else b""
        self._on_outdated = on_outdated or (lambda: self.send(pb.GoAway()))
        self._trust = trust
        self._accept = accept
        self._limits = limits
        self._state = StreamState.GREETING
        self._parser = FrameParser(limits.max_frame_bytes)
        self._room = self._parser.room()
        self._greeting = b""
        self._receive: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        # Frames that are sent before the stream is open wait here.
        self._unsent: list[Buffer] = []
        self._num_unsent_bytes = 0
        self._end: StreamEnd | None = None
        # Bytes that wait until the transport has written others; frames that follow wait behind them.
        self._held: deque[Buffer] = deque()
        self._num_held_bytes = 0
        self._is_paused = False
        # All bytes ever written; then, at the last look, how many were delivered and how many waited in this process.
        self._num_written_bytes = 0
        self._num_drained_bytes = 0
        self._num_backlog_bytes = 0
        self._heard_s = 0.0
        self._has_pinged = False
        self._next_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_peer_valid: Callable[[], bool] = lambda: True

    @property
    def heard_s(self) -> float:
        return self._heard_s

    @property
    def num_waiting_bytes(self) -> int:
        if self._state is StreamState.ENDED:
            return 0
        if self._transport is None:
            return self._num_unsent_bytes
        return self._num_unsent_bytes + self._num_held_bytes + self._transport.get_write_buffer_size()

    def send(self, control: Message, payload: Buffer = b"") -> None:
        if self._end is not None or self._state not in (StreamState.GREETING, StreamState.OPEN):
            return
        transport = self._transport
        if transport is not None and transport.is_closing():
            return
        parts = encode(control, payload)
        num_bytes = sum(map(len, parts))
        if self.num_waiting_bytes + num_bytes > self._limits.max_waiting_bytes:
            raise QueueFull("the other end of a stream does not read what it is sent")
        if transport is not None and self._state is StreamState.OPEN:
            self._write(transport, parts)
        else:
            self._unsent += parts
            self._num_unsent_bytes += num_bytes

    def close(self) -> None:
        end = StreamEnd(StreamCause.CLOSED)
        if self._state is StreamState.GREETING and self._unsent and self._end is None:
            self._end = end
            self._loop.call_later(self._limits.flush_s, self.abort)
        else:
            self._stop(end)

    def fail(self, error: CorollaError) -> None:
        self._stop(StreamEnd(StreamCause.FAILED, error))

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        if self._end is None:
            self._end = StreamEnd(cause)
        if self._transport is None:
            self._conclude()
            return
        if self._state is not StreamState.ENDED:
            self._move(StreamState.CLOSING)
        self._transport.abort()

    def begin(self, address: str) -> None:
        """Starts to connect, as the calling end."""
        self._connecting = self._loop.create_task(self._connect(address))

    # --- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._state is StreamState.ENDED:
            self._transport.abort()
            return
        self.peer_address = host_port(*(transport.get_extra_info("peername") or ("?", 0))[:2])
        if self._trust is not None:
            self.peer = workload_of_transport(transport)
            self._is_peer_valid = self._trust.credentials.peer_validity(transport)
            if not self._is_peer_valid():
                self._end_as_invalid()
                return
        self._transport.write(_GREETING.pack(_MAGIC, VERSION, 0))
        self._timer = self._loop.call_later(self._limits.greeting_s, self._on_no_greeting)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._room = self._parser.room()
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_s = self._loop.time()
        self._has_pinged = False
        try:
            if self._state is StreamState.GREETING:
                frames = self._parser.feed(self._greet(bytes(self._room[:nbytes])))
            else:
                frames = self._parser.filled(nbytes)
            for frame in frames:
                self._take(frame)
        except Exception as failure:
            self._on_refused(failure)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write_held()

    def connection_lost(self, failure: Exception | None) -> None:
        self._conclude()

    # --- within ------------------------------------------------------------------------------------------------------

    async def _connect(self, address: str) -> None:
        deadline_s = self._loop.time() + self._limits.connect_s
        place = split_address(address)
        if place is None:
            self._conclude()
            return
        tls = self._trust.credentials.for_connections() if self._trust is not None else None
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._loop.create_connection(lambda: self, *place, ssl=tls)
        except Exception:  # no process answers
            self._conclude()
            return
        if self._state is StreamState.GREETING and self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_at(deadline_s, self.abort)

    def _conclude(self) -> None:
        """Ends the stream: from now on no bytes are read or written."""
        if self._state is StreamState.ENDED:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        self._unsent.clear()
        self._held.clear()
        self._move(StreamState.ENDED)
        self.ended.set_result(self._end or StreamEnd(StreamCause.LOST))

    def _greet(self, data: bytes) -> bytes:
        """Reads the greeting, and returns the bytes that follow it."""
        self._greeting += data
        if not _MAGIC.startswith(self._greeting[: len(_MAGIC)]):
            raise MalformedMessage("stream", "the other end does not speak this protocol")
        if len(self._greeting) < _GREETING.size:
            return b""
        _, version, _ = _GREETING.unpack_from(self._greeting)
        if version != VERSION:
            raise FingerprintMismatch(
                f"the other end speaks version {version} of the data plane, and this process version {VERSION}"
            )
        self._move(StreamState.OPEN)
        if self._trust is not None and not self._trust.admits(self.peer):
            raise RoleDenied("the certificate of the other end names an identity that may not connect here")
        rest, self._greeting = self._greeting[_GREETING.size :], b""
        if self._transport is not None and self._unsent:
            self._write(self._transport, self._unsent)
        self._unsent, self._num_unsent_bytes = [], 0
        if self._end is not None:  # `close` was called meanwhile
            end, self._end = self._end, None
            self._stop(end)
            return b""
        self._look_again()
        self._receive = self._accept(self)
        return rest

    def _write(self, transport: asyncio.Transport, parts: Sequence[Buffer]) -> None:
        num_bytes = sum(map(len, parts))
        self._num_written_bytes += num_bytes
        if not self._held and num_bytes <= _PIECE_BYTES:
            transport.writelines(parts)
            return
        for part in parts:
            view = memoryview(part)
            self._held.extend(view[start : start + _PIECE_BYTES] for start in range(0, len(view), _PIECE_BYTES))
        self._num_held_bytes += num_bytes
        self._write_held()

    def _write_held(self, *, everything: bool = False) -> None:
        """Writes what is held until the transport has enough to write, or all of it.

        TLS encrypts what it is given at once, and takes three times as long for many megabytes as for pieces.
        """
        while self._held and self._transport is not None and (everything or not self._is_paused):
            piece = self._held.popleft()
            self._num_held_bytes -= len(piece)
            self._transport.write(piece)

    def _take(self, frame: Frame) -> None:
        if self._state is not StreamState.OPEN or self._receive is None:
            return
        match frame.control:
            case pb.Ping():
                self.send(pb.Pong())
            case pb.Pong():
                pass
            case pb.End():
                self._on_end(frame.control)
            case _:
                self._receive(frame)

    def _on_refused(self, failure: Exception) -> None:
        """Ends the stream with an error for the other end, because a frame was malformed or refused."""
        if not isinstance(failure, CorollaError):
            log.error("a frame could not be handled", extra={"address": self.peer_address, "where": call_path(failure)})
            failure = InternalError("an internal error ended the stream")
        elif isinstance(failure, RoleDenied):
            who = self.peer.audited() if self.peer is not None else {}
            audit.write("stream", {"outcome": failure.reason, "peer": self.peer_address, **who})
        self.fail(failure)

    def _on_end(self, control: pb.End) -> None:
        if control.reason:
            error = from_reason(control.reason, control.message, dict(control.metadata))
            self._end = StreamEnd(StreamCause.FAILED, error)
        else:
            self._end = StreamEnd(StreamCause.CLOSED)
        self._close_transport()

    def _stop(self, end: StreamEnd) -> None:
        if self._state in (StreamState.CLOSING, StreamState.ENDED):
            return
        if self._state is StreamState.OPEN and self._transport is not None and not self._transport.is_closing():
            control = pb.End()
            if end.error is not None:
                control = pb.End(reason=end.error.reason, message=end.error.message, metadata=end.error.metadata)
            self._write_held(everything=True)
            self._transport.writelines(encode(control))
        if self._end is None:
            self._end = end
        self._close_transport()

    def _close_transport(self) -> None:
        if self._transport is None:
            self._conclude()
            return
        self._move(StreamState.CLOSING)
        if self._timer is not None:
            self._timer.cancel()
        self._write_held(everything=True)
        self._transport.close()
        self._timer = self._loop.call_later(self._limits.flush_s, self._transport.abort)

    def _look_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        interval_s = self._limits.silence_s / _NUM_LOOKS
        self._next_look_s = self._loop.time() + interval_s
        self._timer = self._loop.call_at(self._next_look_s, self._look)

    def _look(self) -> None:
        """Asks a silent other end whether it lives, and ends the stream without an answer or a valid certificate.

        If this process itself was held up, the other end's answer may still be unread, so the stream asks again. An end
        that reads the bytes that wait for it counts as living, since the Ping comes after these bytes.
        """
        if not self._is_peer_valid():
            self._end_as_invalid()
            return
        now_s = self._loop.time()
        if self._is_draining():
            self._heard_s = now_s
        if now_s - self._next_look_s > self._limits.silence_s / 4:
            self._heard_s = now_s - self._limits.ping_after_s
            self._has_pinged = False
        silence_s = now_s - self._heard_s
        if silence_s >= self._limits.silence_s:
            self.abort(StreamCause.SILENT)
            return
        if silence_s >= self._limits.ping_after_s and not self._has_pinged:
            self._has_pinged = True
            with contextlib.suppress(QueueFull):  # an end that reads nothing does not answer either
                self.send(pb.Ping())
        if self._trust is not None and self._certificate != self._trust.credentials.certificate:
            with contextlib.suppress(QueueFull):  # the next look tries again
                self._on_outdated()
        self._look_again()

    def _end_as_invalid(self) -> None:
        """Ends the stream, since the other end's certificate was revoked, has expired, or has lost its authority."""
        who = self.peer.audited() if self.peer is not None else {}
        audit.write("stream", {"outcome": Unauthenticated.reason, "peer": self.peer_address, **who})
        self.abort()

    def _is_draining(self) -> bool:
        """Bytes waited here at the last look, and the other end's machine has received some since.

        The system accepts more bytes only once a third of its own buffer is free, which takes seconds on a slow
        network. So the bytes that leave that buffer count, too, while others wait in this process. If bytes wait only
        in that buffer, they do not count, since the machine of a frozen process still receives them.
        """
        backlog_bytes = self._num_held_bytes
        if self._transport is not None:
            backlog_bytes += self._transport.get_write_buffer_size()
        drained_bytes = self._num_written_bytes - backlog_bytes
        if backlog_bytes and self._transport is not None:
            drained_bytes -= _num_unacknowledged_bytes(self._transport)
        is_draining = self._num_backlog_bytes > 0 and drained_bytes > self._num_drained_bytes
        self._num_backlog_bytes, self._num_drained_bytes = backlog_bytes, drained_bytes
        return is_draining

    def _on_no_greeting(self) -> None:
        self._end = StreamEnd(StreamCause.FAILED, DeadlineExceeded("the other end did not send its greeting in time"))
        if self._transport is not None:
            self._transport.abort()

    def _move(self, state: StreamState) -> None:
        if state is not self._state:
            if state not in TRANSITIONS[self._state]:
                raise InternalError(f"a stream in the state {self._state.value} cannot change to {state.value}")
            self._state = state


def _unavailable(place: str, failure: OSError) -> str:
    """Returns the error message for an address on which a process cannot listen."""
    return f"cannot listen on {place} ({failure.strerror or failure}); choose another port, or stop what listens there"


def _num_unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Returns the number of bytes that the system has not yet delivered to the other end's machine."""
    try:
        (num_bytes,) = _COUNT.unpack(
            fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
        )
    except OSError:  # some systems do not report it
        return 0
    return int(num_bytes)


def connect(
    address: str,
    accept: Accept,
    limits: StreamLimits | None = None,
    *,
    trust: StreamTrust | None = None,
    on_outdated: Callable[[], None] | None = None,
) -> FrameStream:
    """Begins a stream to `host:port`. Frames that are sent before it is open wait."""
    stream = FrameStream(accept, limits or between_servers(), trust, on_outdated)
    stream.begin(address)
    return stream


class StreamListener:
    """Binds a port of this machine, and accepts streams there after `start`.

    Args:
        port: the port to bind; 0 takes a free one.

    Attributes:
        port: the port that was bound.

    Raises:
        StartupError: the address is taken, or does not belong to this machine.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # If a name has IPv4 and IPv6 addresses, the IPv4 one is bound, since other processes call that.
            family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(address)
        except OSError as failure:
            raise StartupError(_unavailable(host_port(host, port), failure)) from None
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._acceptor: Acceptor | None = None
        self._streams: set[FrameStream] = set()

    async def start(
        self, accept: Accept, limits: StreamLimits | None = None, *, trust: StreamTrust | None = None
    ) -> None:
        """Begins to accept streams. Connections before this call are refused."""
        limits, options = limits or from_callers(), dict[str, Any]()
        if trust is not None:
            # The handshake has the same time limit as the greeting.
            options = {"ssl": trust.credentials.for_listeners(), "ssl_handshake_timeout": limits.greeting_s}
        loop = asyncio.get_running_loop()

        async def serve(caller: socket.socket) -> None:
            stream = FrameStream(accept, limits, trust)
            self._streams.add(stream)
            try:
                await loop.connect_accepted_socket(lambda: stream, caller, **options)
                await stream.ended
            finally:
                self._streams.discard(stream)

        try:
            self._acceptor = Acceptor(self._socket, min(MOST_PEERS, most_connections_of_a_port()), serve)
        except OSError as failure:  # another process that had also bound the port now listens on it
            raise StartupError(_unavailable(f"port {self.port}", failure)) from None

    def release(self) -> None:
        """Releases the port, and accepts no more streams."""
        if self._acceptor is not None:
            self._acceptor.stop()
        self._socket.close()

    async def close(self) -> None:
        """Releases the port, and closes all open streams."""
        self.release()
        streams = list(self._streams)
        for stream in streams:
            stream.close()
        if streams:
            await asyncio.wait([stream.ended for stream in streams])
