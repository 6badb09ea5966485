"""Connections between services."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corolla.chassis import channels
from corolla.chassis.channels import CallerBounds, bind, new_server, open_channel, unreached
from corolla.chassis.errors import InvalidRequest, RouterUnavailable
from corolla.chassis.health import HealthServicer


@asynccontextmanager
async def serving(port: int = 0, callers: CallerBounds | None = None) -> AsyncIterator[int]:
    server = new_server(callers)
    servicer = HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", port)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def test_a_new_channel_does_not_wait_for_one_that_failed() -> None:
    """A channel reaches a server that has returned at once, although other channels still back off."""
    async with serving() as port:
        pass
    async with asyncio.timeout(60), open_channel(f"127.0.0.1:{port}") as old:
        old.get_state(try_to_connect=True)
        await asyncio.sleep(4)  # by then its pauses are long
        async with serving(port), open_channel(f"127.0.0.1:{port}") as new:
            stub: Any = health_pb2_grpc.HealthStub(new)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("callers", [CallerBounds(1 << 20, 2, 3600.0), CallerBounds(1 << 20, 4096, 3600.0), None])
async def test_a_server_has_so_many_connections_and_no_more(
    callers: CallerBounds | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a port may have few descriptors, also a server of other services."""
    monkeypatch.setattr(channels, "most_connections_of_a_port", lambda: 2)
    async with serving(callers=callers) as port:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        # Its first frame shows that a connection was taken.
        assert all([await reader.read(1) for reader, _ in kept])
        reader, refused = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        for _, writer in (*kept, (reader, refused)):
            writer.close()


async def test_a_connection_that_grew_old_takes_no_new_call_and_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[str] = []
    check = HealthServicer.Check

    async def noting(self: Any, request: Any, context: Any) -> Any:
        connections.append(context.peer())
        return await check(self, request, context)

    monkeypatch.setattr(HealthServicer, "Check", noting)
    async with (
        serving(callers=CallerBounds(1 << 20, 4096, 1.0)) as port,
        asyncio.timeout(60),
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert await watch.read()
        await stub.Check(health_pb2.HealthCheckRequest())
        await asyncio.sleep(2)
        await stub.Check(health_pb2.HealthCheckRequest())
        assert connections[0] != connections[1]
        assert not watch.done()
        watch.cancel()


@pytest.mark.parametrize(
    "address, details, sentence",
    [
        ("127.0.0.1:1", "Failed to connect to remote host: Connection refused", r"at 127\.0\.0\.1:1: nothing listens"),
        (
            "127.0.0.1:8080",
            "(Trying to connect an http1.x server (HTTP status 404))",
            "HTTP port; name the port for gRPC",
        ),
        ("127.0.0.1:22", "Failed parsing HTTP/2: got HTTP2 frame type 80", "another protocol"),
        ("no-such:50051", "errors resolving no-such:50051: Domain name not found", "no machine has the name no-such"),
        ("[::1]:1", "Socket closed", r"no router answers at \[::1\]:1$"),
        ("dns:///service", "Socket closed", "no router answers at dns:///service$"),
        ("nonsense", "errors resolving nonsense", "'nonsense' is no address; write HOST:PORT"),
        ("http://127.0.0.1:8080", "errors resolving", "'http://127.0.0.1:8080' is no address"),
        ("127.0.0.1:99999", "Connection refused", "'127.0.0.1:99999' is no address"),
        (":50051", "host must not be empty", "':50051' is no address"),
        ("", "the target uri is not valid", "'' is no address"),
    ],
)
def test_an_address_without_a_service_differs_from_an_invalid_address(
    address: str, details: str, sentence: str
) -> None:
    error = unreached(RouterUnavailable, "router", address, details)
    assert isinstance(error, InvalidRequest if "no address" in sentence else RouterUnavailable)
    assert re.search(sentence, error.message)
