"""HTTP connections, whose protocol uvicorn handles.

`Connection` limits the time within which a head must arrive, and the bytes that it reads in one turn of the event loop,
so that all connections share the loop fairly.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_BYTES_PER_TURN: Final = 1024
"""The most bytes to read in one turn. A chunk of a body may have only one byte, and costs about 20 microseconds."""
_WHOLE_BODY_BYTES_PER_TURN: Final = 64 << 10
"""The most bytes to read in one turn from a body with a content-length, which has no chunks."""
_MAX_HEAD_LINES: Final = 256
"""The most lines of a head. Each costs 4 microseconds, and the heads of many connections may end in the same turn."""
_HEAD_END: Final = b"\r\n\r\n"
_TOO_MANY_LINES: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class Connection(asyncio.BufferedProtocol):
    """A connection with one caller.

    Args:
        head_timeout_s: seconds within which a request's head must arrive, counted from the beginning of the connection
            or, for later requests, from the head's first byte.

    Attributes:
        is_open: whether TLS, if any, has begun.
        lost: a future that is done when the connection has ended.
        failure: why it ended before all was sent; None: all was sent, or it has not ended.
        speaker: uvicorn's protocol, which gets the bytes; it is set before the connection begins.
    """

    speaker: H11Protocol

    def __init__(self, head_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._head_timeout_s = head_timeout_s
        self._buffer = bytearray()
        self._num_whole_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_requests = 0
        self._num_head_lines = 0
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def abort(self) -> None:
        """Ends the connection and drops its buffers."""
        if self._transport is not None:
            self._transport.abort()

    async def sent(self, timeout_s: float) -> None:
        """Waits until little is left to be sent. Raises TimeoutError if the caller takes nothing for so long."""
        while self._transport is not None and not self.lost.done() and self.speaker.flow.write_paused:
            num_left = self._transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.speaker.flow.drain()
            except TimeoutError:
                if self._transport.get_write_buffer_size() >= num_left:
                    raise

    @contextmanager
    def answering(self, num_body_bytes: int) -> Iterator[None]:
        """Counts a request, whose head has arrived, as being answered until the context ends.

        Args:
            num_body_bytes: the size of the body; 0 for a body in chunks.
        """
        self._num_requests += 1
        self._num_whole_bytes = num_body_bytes
        self._num_head_lines = 0
        self._end_watch()
        try:
            yield
        finally:
            self._num_requests -= 1
            self._num_whole_bytes = 0

    # --- what the event loop calls ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._watch_head()
        self.speaker.connection_made(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        size = min(self._num_whole_bytes, _WHOLE_BODY_BYTES_PER_TURN)
        self._buffer = bytearray(max(size, _BYTES_PER_TURN))
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self._num_whole_bytes -= nbytes
        data, self._buffer = bytes(memoryview(self._buffer)[:nbytes]), bytearray()
        if not self._num_requests:
            self._watch_head()
            self._num_head_lines += data.partition(_HEAD_END)[0].count(b"\n")
            if self._num_head_lines > _MAX_HEAD_LINES and self._transport is not None:
                self._transport.write(_TOO_MANY_LINES)
                self._transport.close()
                return
        self.speaker.data_received(data)
        if self._transport is not None and not self.speaker.flow.read_paused:
            # The pause keeps uvloop from reading more in the same turn of the event loop.
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self.speaker.flow.read_paused:
            self._transport.resume_reading()

    def eof_received(self) -> None:
        self.speaker.eof_received()

    def pause_writing(self) -> None:
        self.speaker.pause_writing()

    def resume_writing(self) -> None:
        self.speaker.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        self.failure = exc
        self.speaker.connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self.abort)

    def _end_watch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None if the application runs without `HttpServer`."""
    found: Connection | None = scope.get("state", {}).get("connection")
    return found


def watched(app: ASGIApp) -> ASGIApp:
    """Wraps an application so that each connection knows which requests are being answered."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if (connection := connection_of(scope)) is None:
            await app(scope, receive, send)
            return
        with connection.answering(int(Headers(scope=scope).get("content-length", 0))):
            await app(scope, receive, send)

    return answer
