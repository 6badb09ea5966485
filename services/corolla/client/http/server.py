"""Listens for HTTP: uvicorn in the service's own event loop, within bounds, and without a say over the process."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from corolla.chassis.errors import ServiceUnavailable, StartupError
from corolla.client.http.errors import body_of
from corolla.client.http.metrics import HttpMetrics

_Tasks = set[asyncio.Task[None]]

_MAX_HEAD_BYTES: Final = 32 << 10
_KEEP_ALIVE_S: Final = 75
_HANDSHAKE_TIMEOUT_S: Final = 10.0
_BACKLOG: Final = 2048
_EVENTS_PER_TURN: Final = 64
_LAST_WORD_S: Final = 1.0
_FULL_BODY: Final = body_of(ServiceUnavailable("the service has as many connections as it takes"))
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class HttpServer:
    """Serves an ASGI application. Holds its port from the beginning, and listens from `start` on.

    Args:
        host: address to listen on; empty: all.
        port: 0 takes a free one.
        context: what shows a certificate; None: in the clear.
        head_timeout_s: in which the head of a request must have come.

    Raises:
        StartupError: the address is taken, or not ours.
    """

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        metrics: HttpMetrics,
        *,
        max_connections: int,
        head_timeout_s: float,
    ) -> None:
        self._context = context
        self._metrics = metrics
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._server: _Server | None = None
        self._handshakes: _Tasks = set()
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]

    async def start(self, app: ASGIApp) -> None:
        """Takes connections from now on."""
        config = uvicorn.Config(
            app, http=H11Protocol, ws="none", lifespan="off", loop="none", log_config=None, log_level="critical",
            access_log=False, proxy_headers=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        self._server = _Server(config, self)
        await self._server.startup()

    async def run(self) -> None:
        """Looks after what `start` began, for ever."""
        if self._server is not None:
            await self._server.main_loop()

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, gives requests that run `grace_s` seconds, and ends them then."""
        server, self._server = self._server, None
        if server is None:
            self._socket.close()
            return
        await server.leave(grace_s)

    def connection(self, *arguments: Any, **named: Any) -> "_Connection":
        """What speaks with one caller."""
        bounds = self._max_connections, self._head_timeout_s
        return _Connection(*bounds, self._handshakes, self._metrics, *arguments, **named)

    def end_handshakes(self) -> None:
        """Those that have not ended yet."""
        for each in self._handshakes:
            each.cancel()

    async def listen(self, make: Callable[[], "_Connection"]) -> asyncio.Server:
        """Begins to take connections."""
        loop, context = asyncio.get_running_loop(), self._context
        first = make if context is None else lambda: _Handshake(make(), context, self._handshakes)
        return await loop.create_server(first, sock=self._socket, backlog=_BACKLOG)


class _Server(uvicorn.Server):
    """uvicorn's, which listens and leaves as its owner says; what takes signals of the process is never called."""

    def __init__(self, config: uvicorn.Config, owner: HttpServer) -> None:
        super().__init__(config)
        self._owner = owner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> _Connection:
            return self._owner.connection(self.config, self.server_state, {})

        self.servers = [await self._owner.listen(connection)]
        self.started = True

    async def leave(self, grace_s: float) -> None:
        for server in self.servers:
            server.close()
        self._owner.end_handshakes()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks = set(self.server_state.tasks)
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORD_S)
        # What was written last has left the buffers of this process a moment later.
        await asyncio.sleep(0)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Parser(h11.Connection):
    """h11's, which gives so many events in a turn of the event loop, and keeps the rest: a chunk may be one byte.

    Attributes:
        num_left: in this turn.
    """

    num_left = 0

    def next_event(self) -> Any:
        if not self.num_left:
            return h11.NEED_DATA
        self.num_left -= 1
        return super().next_event()


class _Handshake(asyncio.Protocol):
    """A connection until TLS has begun: it has its place from here on, so that handshakes are bounded, too."""

    def __init__(self, connection: "_Connection", context: ssl.SSLContext, handshakes: _Tasks) -> None:
        self._connection = connection
        self._context = context
        self._handshakes = handshakes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._connection.is_refused():
            transport.abort()
            return
        task = asyncio.create_task(self._shake_hands(transport))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, self._connection, self._context, server_side=True, ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S
            )
        except OSError:
            return
        # None: the caller has gone.
        if secured is not None:
            self._handshakes.discard(asyncio.current_task())
            self._connection.connection_made(secured)


class _Connection(H11Protocol):
    """uvicorn's, within bounds: so many at a time, and none that keeps its request's head back or takes all turns."""

    def __init__(
        self,
        max_connections: int,
        head_timeout_s: float,
        handshakes: _Tasks,
        metrics: HttpMetrics,
        *arguments: Any,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.conn = self._parser = _Parser(h11.SERVER, _MAX_HEAD_BYTES)
        self._next_turn: asyncio.Handle | None = None
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._handshakes = handshakes
        self._metrics = metrics
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_open = False
        self._early = b""

    def is_refused(self) -> bool:
        """Whether there are as many as there may be."""
        if len(self.connections) + len(self._handshakes) < self._max_connections:
            return False
        self._metrics.refused_connections.inc()
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.is_refused():
            transport.write(_FULL)
            transport.close()
            return
        self._is_open = True
        super().connection_made(transport)
        self._metrics.connections.inc()
        # Where an answer is not taken, its connection ends at once, with what the buffers hold.
        self.app_state = {"abort": transport.abort}
        self._watch_head()
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_open:
            return
        self._end_watch()
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._metrics.connections.dec()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            # The first request may come with the end of the handshake.
            self._early += data
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._watch_head()
        else:
            self._end_watch()

    def handle_events(self) -> None:
        if self._next_turn is not None:
            return
        self._parser.num_left = _EVENTS_PER_TURN
        super().handle_events()
        if not self._parser.num_left:
            self.transport.pause_reading()
            self._next_turn = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next_turn = None
        if self.transport.is_closing():
            return
        self.handle_events()
        if self._parser.num_left and not self.flow.read_paused:
            self.transport.resume_reading()

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)

    def _end_watch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError:
        raise StartupError(
            f"cannot listen on {host}:{port}: the address is taken or not ours; choose another port for HTTP"
        ) from None
    bound.setblocking(False)
    return bound
