"""The endpoints of HTTP on their own: over real connections, with replies that no model has to make."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from corolla.chassis.calls import Call
from corolla.chassis.errors import InternalError, StartupError, Unauthenticated
from corolla.chassis.failpoints import InjectedFailure
from corolla.chassis.metrics import RpcMetrics
from corolla.client.held_bytes import HeldBytes
from corolla.http.answers import PIECE_CHARS
from corolla.http.completions import CompletionRequest
from corolla.http.endpoints import EndpointFactory
from corolla.http.exchange import Exchange, Limits
from corolla.http.metrics import HttpMetrics
from corolla.http.server import HttpServer
from corolla.trust.workload import Role
from tests.identities import Identities
from tests.integration.waiting import until

SECRET = "the prompt of somebody"
MOST_SENT_BYTES = 32 << 20
"""More than buffers of the system hold."""


class Running:
    """A server of some endpoints, and its metrics."""

    def __init__(self, registry: CollectorRegistry, server: HttpServer) -> None:
        self._registry, self.server = registry, server
        self.num_cleanups = 0

    async def much(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.stream(self._parts())

    async def large(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.reply(b"x" * MOST_SENT_BYTES)

    async def short(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.reply(b"{}")

    async def broken(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.stream(self._failing())

    async def strict(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.read(CompletionRequest)
        await exchange.reply(b"{}")

    async def waits(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.read(CompletionRequest)
        await asyncio.sleep(60)

    async def pieces(self, exchange: Exchange, call: Call[Any]) -> None:
        await exchange.reply_in_pieces(self._pieces(MOST_SENT_BYTES // PIECE_CHARS))

    async def _pieces(self, number: int) -> AsyncGenerator[str, None]:
        for _ in range(number):
            yield "x" * PIECE_CHARS

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
async def running(
    app: ASGIApp | None = None,
    *,
    head_timeout_s: float = 5.0,
    context: ssl.SSLContext | None = None,
    held_bytes: int = 1000,
    reader_timeout_s: float = 0.3,
    tls_end_timeout_s: float = 5.0,
    lets_in: bool = True,
) -> AsyncIterator[Running]:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry, RpcMetrics(registry))
    server = HttpServer(
        "127.0.0.1", 0, context, metrics,
        max_connections=8, head_timeout_s=head_timeout_s, tls_end_timeout_s=tls_end_timeout_s,
    )  # fmt: skip
    service = Running(registry, server)

    async def let_in(call: Call[Any]) -> None:
        if not lets_in:
            raise Unauthenticated("who are you?")

    endpoints = EndpointFactory(let_in, metrics, Limits(1000, HeldBytes(held_bytes), 5.0, reader_timeout_s))
    behaviours = {
        "/much": {"GET": service.much}, "/broken": {"GET": service.broken}, "/short": {"GET": service.short},
        "/large": {"GET": service.large}, "/strict": {"POST": service.strict}, "/pieces": {"GET": service.pieces},
        "/waits": {"POST": service.waits},
    }  # fmt: skip
    routes = [Route(path, endpoints.endpoint(path, methods)) for path, methods in behaviours.items()]
    await server.start(app or Router(routes, default=endpoints.not_found))
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


def posted(body: bytes, *headers: bytes, path: bytes = b"/strict") -> bytes:
    lines = (
        b"POST %b HTTP/1.1" % path, b"host: a", b"content-type: application/json", b"connection: close",
        b"content-length: %d" % len(body), *headers,
    )  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_an_answer_that_nobody_takes_ends_with_its_connection() -> None:
    async with running() as service:
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", service.server.port))
            connection.sendall(b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n")
            await until(lambda: service.num_cleanups == 1 and service.count("corolla_http_connections") == 0)
            assert service.count("corolla_errors_total", reason="CALLER_STALLED") == 1
            assert service.count("corolla_http_requests_total", route="GET /much", status="408", fault="caller") == 1


async def test_a_reply_that_its_caller_did_not_wait_for_was_not_sent() -> None:
    async with running() as service:
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", service.server.port))
            connection.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
            await asyncio.get_running_loop().run_in_executor(None, connection.recv, 1000)
        await until(
            lambda: service.count("corolla_http_requests_total", route="GET /large", status="499", fault="caller") == 1
        )
        assert service.count("corolla_http_requests_total", route="GET /large", status="200", fault="none") == 0


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


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Runs on Python's event loop, and on the one that services run on."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.mark.parametrize("is_secret", [False, True], ids=["clear", "tls"])
def test_a_body_of_tiny_chunks_leaves_turns_to_others(runner: asyncio.Runner, tmp_path: Path, is_secret: bool) -> None:
    runner.run(send_tiny_chunks(Identities(tmp_path).folder_of(Role.CLIENT, "public") if is_secret else None))


async def send_tiny_chunks(certificate: Path | None) -> None:
    found: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        has_more = True
        while has_more:
            message = await receive()
            found.append(message["body"])
            has_more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with running(app, context=server_side(certificate)) as service:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            service.server.port,
            ssl=caller_side(certificate),
            server_hostname="localhost" if certificate else None,
        )
        head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        for _ in range(2):  # the connection goes on
            writer.write(head + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
            async with asyncio.timeout(30):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert b"".join(found) == b"x" * 20_000
            assert max(map(len, found)) <= 256
            found.clear()
        writer.close()


def test_a_caller_that_sends_more_than_it_asks_for_is_not_read_on(runner: asyncio.Runner) -> None:
    runner.run(send_more_than_is_asked_for())


async def send_more_than_is_asked_for() -> None:
    may_answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/second":
            await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with running(app) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
        writer.write(b"".join(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path for path in (b"/first", b"/second")))
        num_sent = 0
        with suppress(TimeoutError):
            while num_sent < MOST_SENT_BYTES:
                writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 1000)
                async with asyncio.timeout(1):
                    await writer.drain()
                num_sent += 29_000
        assert num_sent < MOST_SENT_BYTES
        may_answer.set()
        async with asyncio.timeout(10):
            for _ in range(3):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()


def server_side(certificate: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
    return context


def caller_side(certificate: Path | None) -> ssl.SSLContext | None:
    return None if certificate is None else ssl.create_default_context(cafile=str(certificate / "ca.crt"))


def test_a_handshake_that_has_begun_before_it_is_taken_succeeds(runner: asyncio.Runner, tmp_path: Path) -> None:
    certificate = Identities(tmp_path).folder_of(Role.CLIENT, "public")
    context = caller_side(certificate)
    assert context is not None

    def ask(port: int) -> bytes:
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        with context.wrap_socket(plain, server_hostname="localhost") as secured:
            secured.sendall(b"GET /nothing HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            return secured.recv(12)

    async def serve() -> bytes:
        async with running(context=server_side(certificate)) as service:
            asking = asyncio.create_task(asyncio.to_thread(ask, service.server.port))
            await asyncio.sleep(0)
            time.sleep(0.2)  # noqa: ASYNC251 - the event loop is busy while the first bytes come
            return await asking

    assert runner.run(serve()) == b"HTTP/1.1 404"


def test_a_refused_stranger_that_does_not_end_tls_loses_its_connection(runner: asyncio.Runner, tmp_path: Path) -> None:
    certificate = Identities(tmp_path).folder_of(Role.CLIENT, "public")
    context = caller_side(certificate)
    assert context is not None

    def refused(port: int) -> ssl.SSLSocket:
        secured = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 10), server_hostname="localhost")
        secured.sendall(b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n")
        assert secured.recv(12) == b"HTTP/1.1 401"
        return secured

    async def serve() -> None:
        async with running(context=server_side(certificate), tls_end_timeout_s=0.1, lets_in=False) as service:
            with await asyncio.to_thread(refused, service.server.port):
                await until(lambda: service.count("corolla_http_connections") == 0, timeout_s=10)

    runner.run(serve())


@pytest.mark.parametrize("first", [b"", b"GET /short HTTP/1.1\r\nhost: a\r\n\r\n"], ids=["first", "second"])
async def test_a_head_that_does_not_come_ends_the_connection(first: bytes) -> None:
    async with running(head_timeout_s=0.3) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
        writer.write(first)
        async with asyncio.timeout(10):
            if first:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            writer.write(b"POST /strict HTTP/1.1\r\nhost: a\r\n")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


BODY = b'{"prompt":"%b"}' % (b"x" * 600)
UNREAD = {
    "a part of a body": posted(BODY, path=b"/waits")[:-1],
    "the body of a request that runs": posted(BODY, path=b"/waits"),
    "a reply": b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n",
    "a reply in pieces": b"GET /pieces HTTP/1.1\r\nhost: a\r\n\r\n",
}


@pytest.mark.parametrize("what", UNREAD)
async def test_bodies_and_replies_are_under_one_budget_until_their_calls_end(what: str) -> None:
    async with running(reader_timeout_s=60.0) as service:

        async def is_full() -> bool:
            reply = await asked(service, posted(b" " * 500))
            return reply.startswith(b"HTTP/1.1 429 ") and b"queue_full" in reply and b"retry-after: 1" in reply

        async def has_room() -> bool:
            return not await is_full()

        assert await has_room()
        _, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
        writer.write(UNREAD[what])
        await until(is_full)
        writer.transport.abort()
        await until(has_room)


async def test_a_reply_that_is_made_is_sent_whatever_the_service_holds() -> None:
    async with running(held_bytes=1) as service:
        reply = await asked(service, b"GET /pieces HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert len(reply.partition(b"\r\n\r\n")[2]) == MOST_SENT_BYTES


async def test_a_body_that_is_dropped_is_not_held() -> None:
    async with running(reader_timeout_s=60.0) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port)
        writer.write(b"GET /much HTTP/1.1\r\nhost: a\r\ncontent-length: 600\r\n\r\n" + b"x" * 600)
        async with asyncio.timeout(10):
            await reader.readuntil(b"xxx")
        assert b"queue_full" not in await asked(service, posted(b" " * 500))
        writer.transport.abort()


async def test_a_head_of_very_many_lines_is_refused_before_it_is_read() -> None:
    async with running() as service:
        head = b"POST /strict HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * 300
        assert (await asked(service, head)).startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_is_too_large_is_refused() -> None:
    async with running() as service:
        reply = await asked(service, b"GET / HTTP/1.1\r\nx: ".ljust(33 << 10, b"y"))
        assert reply.startswith(b"HTTP/1.1 400 ")


async def test_run_raises_the_error_if_serving_fails(arm: Callable[[str], None]) -> None:
    arm("fail:http:2")
    async with asyncio.timeout(30), running() as service:
        with pytest.raises(InjectedFailure):
            await service.server.run()


async def test_a_taken_port_is_said_at_once() -> None:
    async with running() as service:
        metrics = HttpMetrics(CollectorRegistry(), RpcMetrics(CollectorRegistry()))
        with pytest.raises(StartupError, match="choose another port for HTTP"):
            HttpServer("127.0.0.1", service.server.port, None, metrics, max_connections=8, head_timeout_s=5.0)


async def test_a_body_of_nothing_but_faults_is_refused_in_one_sentence() -> None:
    async with running() as service:
        body = json.dumps({name: [{}] for name in CompletionRequest.model_fields}).encode()
        reply = await asked(service, posted(body))
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"] == "body: has more than 32 faults"
