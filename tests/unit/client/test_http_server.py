"""The door of HTTP on its own: over real connections, with replies that no model has to make."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from corolla.chassis.calls import Call
from corolla.chassis.errors import InternalError, StartupError
from corolla.chassis.metrics import RpcMetrics
from corolla.client.http.completions import CompletionRequest
from corolla.client.http.door import Door
from corolla.client.http.exchange import Exchange, HeldBytes, Limits
from corolla.client.http.metrics import HttpMetrics
from corolla.client.http.server import HttpServer
from tests.integration.waiting import until

SECRET = "the prompt of somebody"


class Running:
    """A served door, and its metrics."""

    def __init__(self, registry: CollectorRegistry, server: HttpServer) -> None:
        self._registry, self.server = registry, server
        self.num_cleanups = 0

    async def much(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.without_body()
        await exchange.stream(self._parts())

    async def broken(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.without_body()
        await exchange.stream(self._failing())

    async def strict(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.read(CompletionRequest)
        await exchange.reply(b"{}")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x" * (1 << 18)
        finally:
            self.num_cleanups += 1

    async def _failing(self) -> AsyncGenerator[bytes, None]:
        yield b"data: first\n\n"
        raise RuntimeError(SECRET)

    def count(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0


@asynccontextmanager
async def running(app: ASGIApp | None = None) -> AsyncIterator[Running]:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry, RpcMetrics(registry))
    server = HttpServer("127.0.0.1", 0, None, metrics, max_connections=8, head_timeout_s=5.0)
    service = Running(registry, server)

    async def let_in(call: Call[Any]) -> None:
        pass

    door = Door(let_in, metrics, Limits(1000, HeldBytes(1000), 5.0, 0.3))
    behaviours = {
        "/much": {"GET": service.much},
        "/broken": {"GET": service.broken},
        "/strict": {"POST": service.strict},
    }
    routes = [Route(path, door.endpoint(path, methods)) for path, methods in behaviours.items()]
    await server.start(app or Router(routes, default=door.not_found))
    try:
        yield service
    finally:
        await server.stop(0)


async def asked(service: Running, text: bytes) -> bytes:
    """The whole reply to what is said on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
    writer.write(text)
    async with asyncio.timeout(10):
        found = await reader.read()
    writer.close()
    return found


def posted(body: bytes, *headers: bytes) -> bytes:
    lines = (b"POST /strict HTTP/1.1", b"host: a", b"connection: close", b"content-length: %d" % len(body), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_an_answer_that_nobody_takes_ends_with_its_connection() -> None:
    async with running() as service:
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", service.server.port))
            connection.sendall(b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n")

            async def is_over() -> bool:
                return service.num_cleanups == 1 and service.count("corolla_http_connections") == 0

            await until(is_over)
            assert service.count("corolla_errors_total", reason="CALLER_STALLED") == 1
            assert service.count("corolla_http_requests_total", route="GET /much", status="408", fault="caller") == 1


async def test_what_fails_in_a_stream_is_its_last_event_and_says_nothing_of_its_text() -> None:
    async with running() as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
        writer.write(b"GET /broken HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(10):
            text = (await reader.read()).decode()
        writer.close()
        assert text.startswith("HTTP/1.1 200 ")
        assert 'event: error\ndata: {"error": {"message": "internal error"' in text
        assert SECRET not in text
        assert service.count("corolla_errors_total", reason=InternalError.reason) == 1
        assert service.count("corolla_http_requests_total", route="GET /broken", status="500", fault="service") == 1


async def test_a_body_of_tiny_chunks_leaves_turns_to_others() -> None:
    found: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_more = True
        while has_more:
            message = await receive()
            found.append(message["body"])
            has_more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with running(app) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        for _ in range(2):  # the connection goes on
            writer.write(head + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
            async with asyncio.timeout(30):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert b"".join(found) == b"x" * 20_000
            assert max(map(len, found)) <= 256
            found.clear()
        writer.close()


async def test_a_taken_port_is_said_at_once() -> None:
    async with running() as service:
        metrics = HttpMetrics(CollectorRegistry(), RpcMetrics(CollectorRegistry()))
        with pytest.raises(StartupError, match="choose another port for HTTP"):
            HttpServer("127.0.0.1", service.server.port, None, metrics, max_connections=8, head_timeout_s=5.0)


async def test_a_body_of_nothing_but_faults_is_refused_in_one_sentence() -> None:
    async with running() as service:
        body = json.dumps({"prompt": "a", **{f"x{number}": 0 for number in range(65)}}).encode()
        reply = await asked(service, posted(body, b"content-type: application/json"))
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"] == "body: has more than 64 faults"
