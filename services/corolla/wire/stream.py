"""One connection of the data plane: frames both ways over TCP, or over TLS where a trust is handed in.

Each end first sends a greeting of eight bytes: `CRLL`, the version of this layout, and zero, as little-endian numbers
of 16 bits. Frames follow back to back (`wire/frames`). Three kinds belong to the connection itself: Ping and Pong show
that an end lives that has nothing to send, and End says why an end stops. `ended` says how the stream ended, whichever
end stopped it. An end that was called sends GoAway while it has another certificate than the one that it showed.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Protocol, cast

from google.protobuf.message import Message

from corolla.chassis import audit
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
from corolla.chassis.handlers import where
from corolla.chassis.status import from_reason
from corolla.trust.credentials import Credentials, workload_of_transport
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame, FrameParser, encode

log = logging.getLogger(__name__)

VERSION: Final = 1
_GREETING: Final = struct.Struct("<4sHH")
_MAGIC: Final = b"CRLL"
_COUNT: Final = struct.Struct("i")
_BACKLOG: Final = 128
_NUM_LOOKS: Final = 8
"""How often a stream looks whether the other end is silent while it may be."""


class StreamState(Enum):
    """Where a connection is. `ENDED` is final; a stream in `CLOSING` takes no more frames and writes those it has."""

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
    """How a stream ended. `error` is what one end found wrong with it; None for the other causes."""

    cause: StreamCause
    error: CorollaError | None = None


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What one stream may take, in seconds and bytes.

    Attributes:
        connect_s: until both ends have greeted each other, at the end that calls; then the stream ends as lost.
        greeting_s: until the other end has sent its greeting, at the end that was called.
        ping_after_s: of silence, then the other end is asked whether it lives.
        silence_s: of silence, then the stream ends; more than `ping_after_s`.
        flush_s: for what is still to be written when the stream is closed.
        max_frame_bytes: of one frame that comes in.
        max_waiting_bytes: that wait to be written because the other end does not read.
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
    """What holds for a stream unless its owner says otherwise."""
    return _between_servers


def from_callers() -> StreamLimits:
    """What holds for streams that others begin. One that dies closes them; one that is held up may go on."""
    return replace(
        _between_servers, ping_after_s=_CALLER_PING_S, silence_s=max(_CALLER_SILENCE_S, _between_servers.silence_s)
    )


def tolerate_silence(silence_s: float) -> None:
    """Streams of this process bear that the other end is silent for so long, where their owners do not say otherwise.

    For machines that stop processes for seconds, where a frozen peer noticed late is the lesser evil.
    """
    global _between_servers
    _between_servers = replace(_between_servers, silence_s=silence_s, connect_s=silence_s)


Receiver = Callable[[Frame], None]
"""Takes one frame, at once. Where it raises a CorollaError, the other end learns of it and the stream ends."""

Accept = Callable[["Stream"], Receiver]
"""Called with a stream once both ends have greeted each other; gives who takes the frames."""


@dataclass(frozen=True, slots=True)
class StreamTrust:
    """TLS, and who the other end may be.

    Where the certificate counts no longer that it showed, a stream ends, before anything is read of it or within
    seconds of the change.

    Attributes:
        credentials: of this end.
        roles: one of which the other end must have; to another one, the stream ends with ROLE_DENIED after the
            greetings.
    """

    credentials: Credentials
    roles: frozenset[Role]

    def admits(self, peer: Workload | None) -> bool:
        """Whether the other end may be this one."""
        return peer is not None and self.credentials.knows(peer) and peer.role in self.roles


class Stream(Protocol):
    """Either end of a connection, as those see it who send and receive on it.

    Attributes:
        ended: done when nothing more is sent or received.
    """

    ended: asyncio.Future[StreamEnd]

    @property
    def peer(self) -> Workload | None:
        """Who is at the other end; None where nobody is asked."""

    def send(self, control: Message, payload: Buffer = b"") -> None:
        """Writes a frame, as soon as the stream is open. Once it has ended, frames are dropped: `ended` tells of it.

        Raises:
            QueueFull: too many bytes wait already; nothing of the frame is sent.
        """

    def close(self) -> None:
        """Writes what was sent, and ends."""

    def fail(self, error: CorollaError) -> None:
        """Tells the other end what is wrong with it, and ends."""

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        """Ends at once; the other end learns nothing."""


class Connect(Protocol):
    """What begins streams, as `connect` does."""

    def __call__(self, address: str, accept: Accept, limits: StreamLimits | None = None) -> Stream:
        """A stream to `host:port`; where nobody answers there, it ends as lost."""


class FrameStream(asyncio.Protocol):
    """A `Stream` over TCP or TLS. Made by `connect` and `StreamListener`.

    Args:
        on_outdated: is called now and then while this end has another certificate than it showed; None: GoAway is sent.

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
        # What this end shows, or one before, where it changes just then.
        self._certificate = trust.credentials.certificate if trust is not None else b""
        self._on_outdated = on_outdated or (lambda: self.send(pb.GoAway()))
        self._trust = trust
        self._accept = accept
        self._limits = limits
        self._state = StreamState.GREETING
        self._parser = FrameParser(limits.max_frame_bytes)
        self._greeting = b""
        self._receive: Receiver | None = None
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        # What is sent before the stream is open.
        self._unsent: list[Buffer] = []
        self._num_unsent_bytes = 0
        self._end: StreamEnd | None = None
        # Of bytes written ever, how many had left this process when the stream last looked, and how many waited then.
        self._num_written_bytes = 0
        self._num_drained_bytes = 0
        self._num_backlog_bytes = 0
        self._heard_s = 0.0
        self._has_pinged = False
        self._next_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_believed: Callable[[], bool] = lambda: True

    def send(self, control: Message, payload: Buffer = b"") -> None:
        if self._end is not None or self._state not in (StreamState.GREETING, StreamState.OPEN):
            return
        transport = self._transport
        if transport is not None and transport.is_closing():
            return
        parts = encode(control, payload)
        num_bytes = sum(map(len, parts))
        num_waiting_bytes = self._num_unsent_bytes
        if transport is not None:
            num_waiting_bytes += transport.get_write_buffer_size()
        if num_waiting_bytes + num_bytes > self._limits.max_waiting_bytes:
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
        """Connects, as the end that calls."""
        self._connecting = self._loop.create_task(self._connect(address))

    # --- called by the event loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._state is StreamState.ENDED:
            self._transport.abort()
            return
        self.peer_address = "{}:{}".format(*(transport.get_extra_info("peername") or ("?", "?"))[:2])
        if self._trust is not None:
            self.peer = workload_of_transport(transport)
            self._is_believed = self._trust.credentials.witness(transport)
            if not self._is_believed():
                self._disbelieve()
                return
        self._transport.write(_GREETING.pack(_MAGIC, VERSION, 0))
        self._timer = self._loop.call_later(self._limits.greeting_s, self._on_no_greeting)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        self._has_pinged = False
        try:
            if self._state is StreamState.GREETING:
                data = self._greet(data)
            for frame in self._parser.feed(data):
                self._take(frame)
        except Exception as failure:
            self._on_refused(failure)

    def connection_lost(self, failure: Exception | None) -> None:
        self._conclude()

    # --- within ------------------------------------------------------------------------------------------------------

    async def _connect(self, address: str) -> None:
        deadline_s = self._loop.time() + self._limits.connect_s
        host, _, port = address.rpartition(":")
        tls = self._trust.credentials.for_connections() if self._trust is not None else None
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._loop.create_connection(lambda: self, host.strip("[]"), int(port), ssl=tls)
        except Exception:  # nobody is there, or the address is none
            self._conclude()
            return
        if self._state is StreamState.GREETING and self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_at(deadline_s, self.abort)

    def _conclude(self) -> None:
        """Nothing comes or goes any more."""
        if self._state is StreamState.ENDED:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        self._unsent.clear()
        self._move(StreamState.ENDED)
        self.ended.set_result(self._end or StreamEnd(StreamCause.LOST))

    def _greet(self, data: bytes) -> bytes:
        """Reads the greeting; returns what follows it."""
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
            raise RoleDenied("the other end of a stream is not whom its certificate should name here")
        rest, self._greeting = self._greeting[_GREETING.size :], b""
        if self._transport is not None and self._unsent:
            self._write(self._transport, self._unsent)
        self._unsent, self._num_unsent_bytes = [], 0
        if self._end is not None:  # it was closed meanwhile
            end, self._end = self._end, None
            self._stop(end)
            return b""
        self._look_again()
        self._receive = self._accept(self)
        return rest

    def _write(self, transport: asyncio.Transport, parts: Sequence[Buffer]) -> None:
        transport.writelines(parts)
        self._num_written_bytes += sum(map(len, parts))

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
        """A frame was none, or is not taken: the other end learns why."""
        if not isinstance(failure, CorollaError):
            log.error("a frame could not be handled", extra={"address": self.peer_address, "where": where(failure)})
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
        self._transport.close()
        self._timer = self._loop.call_later(self._limits.flush_s, self._transport.abort)

    def _look_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        interval_s = self._limits.silence_s / _NUM_LOOKS
        self._next_look_s = self._loop.time() + interval_s
        self._timer = self._loop.call_at(self._next_look_s, self._look)

    def _look(self) -> None:
        """Asks a silent end whether it lives, and ends the stream where it does not say so.

        Where this process itself was held up, what the other end said may lie unread: it is asked again. An end that
        takes what waits for it lives; it hears the question only after all that.
        """
        if not self._is_believed():
            self._disbelieve()
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
            with contextlib.suppress(QueueFull):  # it is tried again at the next look
                self._on_outdated()
        self._look_again()

    def _disbelieve(self) -> None:
        """The other end's certificate was revoked, has ended, or is of no authority any more."""
        who = self.peer.audited() if self.peer is not None else {}
        audit.write("stream", {"outcome": Unauthenticated.reason, "peer": self.peer_address, **who})
        self.abort()

    def _is_draining(self) -> bool:
        """Whether bytes waited here at the last look, and the other end's machine has taken some since.

        The system takes more of them only once a third of its own buffer is free, which on a slow way is seconds; so
        what it still has counts, too. What waits nowhere but there does not: a frozen process's machine takes that.
        """
        backlog_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        drained_bytes = self._num_written_bytes - backlog_bytes
        if backlog_bytes and self._transport is not None:
            drained_bytes -= _num_unacknowledged_bytes(self._transport)
        is_draining = self._num_backlog_bytes > 0 and drained_bytes > self._num_drained_bytes
        self._num_backlog_bytes, self._num_drained_bytes = backlog_bytes, drained_bytes
        return is_draining

    def _on_no_greeting(self) -> None:
        self._end = StreamEnd(
            StreamCause.FAILED, DeadlineExceeded("a stream begins with a greeting; that did not come")
        )
        if self._transport is not None:
            self._transport.abort()

    def _move(self, state: StreamState) -> None:
        if state is not self._state:
            if state not in TRANSITIONS[self._state]:
                raise InternalError(f"a stream that is {self._state.value} cannot become {state.value}")
            self._state = state


def _unavailable(place: str, failure: OSError) -> str:
    """The sentence for an address on which a process cannot listen."""
    return f"cannot listen on {place} ({failure.strerror or failure}); choose another port, or stop what listens there"


def _tls_options(trust: StreamTrust | None, limits: StreamLimits) -> dict[str, Any]:
    """Of a listener. Who does not shake hands has no longer than who does not greet."""
    if trust is None:
        return {}
    return {"ssl": trust.credentials.for_listeners(), "ssl_handshake_timeout": limits.greeting_s}


def _num_unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """What the system has still to bring to the other end's machine."""
    try:
        (num_bytes,) = _COUNT.unpack(
            fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
        )
    except OSError:  # a system that does not say
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
    """A stream to `host:port`. What is sent before it is open waits for that."""
    stream = FrameStream(accept, limits or between_servers(), trust, on_outdated)
    stream.begin(address)
    return stream


class StreamListener:
    """Has a port of this machine, and takes streams there from `start` on.

    Args:
        port: 0 takes a free one.

    Attributes:
        port: which it has.

    Raises:
        StartupError: the address is taken, or none of this machine.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # Where a name has addresses of both kinds, others look for it at that of IPv4.
            family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(address)
        except OSError as failure:
            raise StartupError(_unavailable(f"{host}:{port}", failure)) from None
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._streams: set[FrameStream] = set()

    async def start(
        self, accept: Accept, limits: StreamLimits | None = None, *, trust: StreamTrust | None = None
    ) -> None:
        """Takes streams from now on. Until then, who connects is refused."""
        limits = limits or from_callers()

        def make() -> FrameStream:
            stream = FrameStream(accept, limits, trust)
            self._streams.add(stream)
            stream.ended.add_done_callback(lambda _: self._streams.discard(stream))
            return stream

        try:
            # Here, since uvloop says nothing of a socket on which it cannot listen.
            self._socket.listen(_BACKLOG)
            self._server = await asyncio.get_running_loop().create_server(
                make, sock=self._socket, backlog=_BACKLOG, **_tls_options(trust, limits)
            )
        except OSError as failure:  # another process that had bound the port as well listens by now
            raise StartupError(_unavailable(f"port {self.port}", failure)) from None

    def release(self) -> None:
        """Lets go of the port; takes no more streams."""
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def close(self) -> None:
        """Lets go of the port, and closes the streams that are there."""
        self.release()
        streams = list(self._streams)
        for stream in streams:
            stream.close()
        if streams:
            await asyncio.wait([stream.ended for stream in streams])
