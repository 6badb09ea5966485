"""Serves stacks to a test process: block code must not share the event loop, nor the process, of what it calls.

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
    async with AsyncExitStack() as stack:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request: dict[str, Any] = json.loads(line)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            swarm = Swarm(
                Path(folder), Path(request["model"]), request["spans"], server={"kv_cache_mib": request["kv_cache_mib"]}
            )
            await stack.enter_async_context(swarm)
            sys.stdout.write(f"{swarm.router_address} {' '.join(server.address for server in swarm.servers)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve())
