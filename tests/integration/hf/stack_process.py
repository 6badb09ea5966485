"""Serves stacks to a test process: blocking code must share no event loop with what it calls.

Each line on standard input names a checkpoint folder and its spans as JSON, each line on standard output the addresses
of a stack that serves it. An empty object ends all stacks so far, and so does the end of the input.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from corolla.chassis.channels import open_channel
from corolla.v1 import router_pb2, router_pb2_grpc
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.patience import outlast_pauses


async def serve() -> None:
    stacks: list[AsyncExitStack] = []
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            addresses: dict[str, Any] = {}
            if request := json.loads(line):
                stacks.append(AsyncExitStack())
                swarm = await start(stacks[-1], request)
                addresses = {
                    "router": swarm.router_address,
                    "servers": [f"127.0.0.1:{server.control_port}" for server in swarm.servers],
                    "clients": [swarm.address_of(number) for number in range(len(swarm.clients))],
                }
            else:
                await end(stacks)
            sys.stdout.write(json.dumps(addresses) + "\n")
            sys.stdout.flush()
    finally:
        await end(stacks)


async def end(stacks: list[AsyncExitStack]) -> None:
    await asyncio.gather(*(stack.aclose() for stack in stacks))
    stacks.clear()


async def start(stack: AsyncExitStack, request: dict[str, Any]) -> Swarm:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = {"kv_cache_mib": request["kv_cache_mib"]}
    swarm = Swarm(folder, Path(request["model"]), request["spans"], num_clients=request["num_clients"], server=server)
    await stack.enter_async_context(swarm)
    async with open_channel(swarm.router_address) as channel:
        await until(partial(knows_a_chain, router_pb2_grpc.RouterServiceStub(channel)))
    return swarm


async def knows_a_chain(router: "router_pb2_grpc.RouterServiceAsyncStub") -> bool:
    placement = await router.GetPlacement(router_pb2.GetPlacementRequest())
    return bool(placement.HasField("cheapest_chain"))


if __name__ == "__main__":
    outlast_pauses()
    asyncio.run(serve())
