"""Ports of servers that are stopped, and what callers without a key may open."""

import asyncio
import socket
import struct
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from corolla.chassis import health
from corolla.chassis.channels import open_channel
from corolla.chassis.rpc_server import RpcServer
from tests.integration.waiting import until


@pytest.mark.parametrize("has_started", [True, False])
async def test_a_server_that_is_stopped_lets_go_of_its_port(has_started: bool) -> None:
    server = RpcServer("127.0.0.1", 0, with_reflection=False)
    if has_started:
        await server.start()
    assert is_open(server.port)
    await server.stop(0)
    assert not is_open(server.port)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_callers_without_a_key_open_so_many_streams_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MOST_OPEN_STREAMS", 3)
    server = RpcServer("127.0.0.1", 0, with_reflection=True)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        described = reflection.ServerReflectionInfo()
        await described.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert await described.read()
        assert [(await each.read()).status for each in watches] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
        for refused in (stub.Watch(health_pb2.HealthCheckRequest()), reflection.ServerReflectionInfo()):
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.ready()
        assert [(await each.read()).status for each in watches] == [health_pb2.HealthCheckResponse.SERVING] * 2
        described.cancel()
        watches[0].cancel()

        async def is_watched() -> bool:
            return bool(await stub.Watch(health_pb2.HealthCheckRequest()).read())

        await until(is_watched)
    await server.stop(0)


async def test_a_watcher_that_reads_nothing_holds_up_no_change() -> None:
    """It says that it takes no byte of an answer; other servicers wait for it with a lock in their hands."""
    server = RpcServer("127.0.0.1", 0, with_reflection=False)
    await server.start()

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload

    def text(value: bytes) -> bytes:
        return bytes((len(value),)) + value

    fields = b"\x83\x86\x04" + text(b"/grpc.health.v1.Health/Watch") + b"\x01" + text(b"localhost")
    fields += b"\x0f\x10" + text(b"application/grpc") + b"\x00" + text(b"te") + text(b"trailers")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 0)))
    writer.write(frame(1, 4, 1, fields) + frame(0, 1, 1, bytes(5)))
    async with asyncio.timeout(10):
        while b"application/grpc" not in await reader.read(1024):  # the head of its answer
            pass
        await server.ready()
        await server.stop(0)
    writer.close()
