"""The HTTP server: uvicorn runs in the service's own event loop, within limits, and does not handle signals."""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from corolla.chassis import failpoints
from corolla.chassis.acceptor import Acceptor
from corolla.chassis.errors import MalformedMessage, ServiceUnavailable, StartupError
from corolla.http.connections import Connection, watched
from corolla.http.endpoints import UNKNOWN_PATH
from corolla.http.errors import body_of
from corolla.http.metrics import HttpMetrics

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES: Final = 32 << 10
_KEEP_ALIVE_S: Final = 75
_TLS_TIMEOUT_S: Final = 10.0
_LAST_EVENTS_S: Final = 1.0
_FULL_BODY: Final = body_of(ServiceUnavailable("the service has too many connections"))
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class HttpServer:
    """Serves an ASGI application. It binds its port when it is made, and listens from `start` on.

    Args:
        host: the address to listen on; empty: all.
        port: the port; 0 takes a free one.
        context: the TLS context with the certificate; None: HTTP without TLS.
        max_connections: the most connections at a time, including handshakes.
        head_timeout_s: seconds within which the head of a request must arrive.
        tls_end_timeout_s: seconds within which TLS must end after the service has closed a connection.

    Raises:
        StartupError: the address is taken, or does not belong to this machine.
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
        tls_end_timeout_s: float = _TLS_TIMEOUT_S,
    ) -> None:
        self._context = context
        self._tls_end_timeout_s = tls_end_timeout_s
        self._metrics = metrics
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._running: _Running | None = None
        self._connections: dict[asyncio.Task[None] | None, Connection] = {}

    async def start(self, app: ASGIApp) -> None:
        """Accepts connections from now on."""
        config = uvicorn.Config(
            watched(app), http="h11", ws="none", lifespan="off", loop="none", log_config=None, log_level="critical",
            access_log=False, proxy_headers=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )  # fmt: skip
        config.load()
        server = _Server(config)
        acceptor = Acceptor(self._socket, self._max_connections, partial(self._serve, server), self._refuse)
        # uvicorn gets accepted connections and listens on no socket itself.
        serving = asyncio.create_task(failpoints.within("http", server.serve(sockets=[])))
        self._running = _Running(server, serving, acceptor)

    async def run(self) -> None:
        """Waits for ever, or until serving fails; then it raises the error."""
        if (running := self._running) is not None:
            tasks = (running.acceptor.accepting, running.serving)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()
            # Both end without a failure when the service stops, which ends this task, too.
            await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        """Stops accepting connections, gives running requests `grace_s` seconds, and then ends them."""
        running, self._running = self._running, None
        if running is not None:
            running.acceptor.stop()
            await asyncio.wait({running.acceptor.accepting})
        self._socket.close()
        if running is None:
            return
        tasks = running.acceptor.tasks
        for task in tasks:
            if (connection := self._connections.get(task)) is None or not connection.is_open:
                task.cancel()
        running.server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        running.server.should_exit = True
        # `run` raises the error if serving failed.
        await asyncio.wait({running.serving})
        # Cancelled answers send their error, and their connections close.
        await _ended(tasks)
        for connection in self._connections.values():
            connection.abort()
        await _ended(tasks)

    def _refuse(self, caller: socket.socket) -> None:
        self._metrics.refused_connections.inc()
        with caller, suppress(OSError):
            if self._context is None:
                caller.send(_FULL)

    async def _serve(self, server: "_Server", caller: socket.socket) -> None:
        """Serves one connection, from its handshake to its end."""
        connection = Connection(self._head_timeout_s)
        state = {"connection": connection, "metrics": self._metrics}
        connection.speaker = _Speaker(server.config, server.server_state, state)
        task = asyncio.current_task()
        self._connections[task] = connection
        try:
            with self._metrics.connections.track_inprogress():
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection,
                    caller,
                    ssl=self._context,
                    ssl_handshake_timeout=_TLS_TIMEOUT_S if self._context is not None else None,
                    ssl_shutdown_timeout=self._tls_end_timeout_s if self._context is not None else None,
                )
                await connection.lost
        finally:
            del self._connections[task]


class _Speaker(H11Protocol):
    """uvicorn's protocol, which also counts requests that it cannot read."""

    def send_400_response(self, msg: str) -> None:
        error = MalformedMessage("request", "is not HTTP")
        self.app_state["metrics"].done(UNKNOWN_PATH, error, 0.0, "caller")
        super().send_400_response(msg)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the service handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Running(NamedTuple):
    """What runs between start and stop."""

    server: _Server
    serving: asyncio.Task[None]
    acceptor: Acceptor


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks.copy(), timeout=_LAST_EVENTS_S)


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
