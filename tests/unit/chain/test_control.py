"""A wrong address of a router: the error names it, and what answered there."""

import asyncio

import grpc
import pytest

from corolla.chain.control import ControlPlane
from corolla.chassis.errors import RouterUnavailable


async def said_at(port: int) -> str:
    control = ControlPlane(f"127.0.0.1:{port}", "model")
    try:
        with pytest.raises(RouterUnavailable) as raised:
            await control.get_placement()
    finally:
        await control.close()
    assert f"127.0.0.1:{port}" in raised.value.message
    return raised.value.message


async def test_nothing_listens() -> None:
    assert "nothing listens there" in await said_at(1)


async def test_another_grpc_service_answers() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert "another gRPC service" in await said_at(port)
    finally:
        await server.stop(None)


async def test_an_http_server_answers() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(16)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        assert "a server of HTTP/1" in await said_at(server.sockets[0].getsockname()[1])
