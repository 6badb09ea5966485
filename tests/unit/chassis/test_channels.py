"""Connections between services."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from corolla.chassis.channels import bind, new_server, open_channel


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[int]:
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
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
