"""Block servers that die in a chosen iteration."""

import asyncio
import time
from collections.abc import Callable, Sequence

from corolla.block_server.service import BlockServer
from corolla.compute.span_runner import RowWork
from tests.faulty_runner import FaultyRunner
from tests.integration.swarm import Swarm

IsFatal = Callable[[Sequence[RowWork]], bool]


def doom(swarm: Swarm, server: BlockServer, is_fatal: IsFatal) -> list[float]:
    """The server dies, without a farewell, in the first iteration that is fatal. Gives the times of its deaths."""
    loop, deaths = asyncio.get_running_loop(), list[float]()

    def die(rows: Sequence[RowWork]) -> None:
        if not deaths and is_fatal(rows):
            deaths.append(time.monotonic())
            asyncio.run_coroutine_threadsafe(swarm.crash(server), loop).result()

    server.engine.runner = FaultyRunner(server.engine.runner, before=die)
    return deaths


def beyond(position: int) -> IsFatal:
    """An iteration that computes the token at `position`."""
    return lambda rows: any(row.position <= position < row.position + row.num_tokens for row in rows)
