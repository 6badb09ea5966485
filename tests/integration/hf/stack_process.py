"""Serves stacks to a test process: blocking code must share no event loop with what it calls.

Each line on standard input names a checkpoint folder and its spans as JSON, each line on standard output the address of
the router of a stack that serves it. The end of the input ends them all.
"""

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.integration.swarm import Swarm


async def serve() -> None:
    stacks: list[AsyncExitStack] = []
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            stacks.append(AsyncExitStack())
            swarm = await start(stacks[-1], json.loads(line))
            sys.stdout.write(f"{swarm.router_address} {' '.join(server.address for server in swarm.servers)}\n")
            sys.stdout.flush()
    finally:
        await asyncio.gather(*(stack.aclose() for stack in stacks))


async def start(stack: AsyncExitStack, request: dict[str, Any]) -> Swarm:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = {"kv_cache_mib": request["kv_cache_mib"]}
    return await stack.enter_async_context(
        Swarm(folder, Path(request["model"]), request["spans"], num_clients=0, server=server)
    )


if __name__ == "__main__":
    asyncio.run(serve())
