"""The client's end of the streams to block servers, against a server that sends only the test's frames."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from corolla.chain.streams import DataPlane
from corolla.chassis.channels import bind, new_server
from corolla.chassis.errors import HopUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import encode, join

PROBE_AFTER_S = 0.1


class SilentServer:
    """Welcomes every client and sends nothing more; the test ends its streams."""

    def __init__(self) -> None:
        self.address = ""
        self.asked = asyncio.Event()
        self.answering = asyncio.Event()
        self._ending = asyncio.Event()

    def end_streams(self) -> None:
        self._ending.set()
        self._ending = asyncio.Event()
        self.asked = asyncio.Event()

    async def exchange(self, requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(join([encode(pb.Welcome(max_tokens_per_frame=8))]))
        await self._ending.wait()

    async def status(self, request: bytes, context: Any) -> bytes:
        self.asked.set()
        await self.answering.wait()
        return b""


@asynccontextmanager
async def silent_server() -> AsyncIterator[SilentServer]:
    silent = SilentServer()
    server = new_server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Exchange": grpc.stream_stream_rpc_method_handler(silent.exchange),
        "GetStatus": grpc.unary_unary_rpc_method_handler(silent.status),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("corolla.v1.BlockService", handlers),))
    silent.address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    try:
        yield silent
    finally:
        await server.stop(0)


async def test_servers_are_watched_though_a_stream_ends_while_its_server_is_asked() -> None:
    async with silent_server() as server:
        plane = DataPlane("fingerprint", TaskGroup(), probe_after_s=PROBE_AFTER_S, probe_timeout_s=60.0)
        try:
            for _ in range(2):
                opening = asyncio.create_task(plane.open(server.address, pb.Open(session_id=bytes(16))))
                async with asyncio.timeout(30):
                    await server.asked.wait()
                    server.end_streams()
                    with pytest.raises(HopUnavailable, match="lost"):
                        await opening
        finally:
            await plane.close()


async def test_a_process_that_was_held_up_does_not_blame_its_servers() -> None:
    """The server answers in time; this process reads it too late, because nothing let it run."""
    async with silent_server() as server:
        plane = DataPlane("fingerprint", TaskGroup(), probe_after_s=PROBE_AFTER_S, probe_timeout_s=1.0)
        try:
            opening = asyncio.create_task(plane.open(server.address, pb.Open(session_id=bytes(16))))
            async with asyncio.timeout(30):
                await server.asked.wait()
                time.sleep(3.0)  # noqa: ASYNC251 - the loop is held up on purpose
                server.answering.set()
                for _ in range(2):
                    server.asked.clear()
                    await server.asked.wait()
            assert not opening.done()
            server.answering.clear()
            async with asyncio.timeout(30):
                with pytest.raises(HopUnavailable, match="does not answer"):
                    await opening
        finally:
            await plane.close()
