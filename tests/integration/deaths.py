"""Block servers that die in a chosen iteration."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from corolla.block_server.service import BlockServer
from corolla.compute.base import RowWork
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Generation
from tests.faulty_runner import plant_fault
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

IsFatal = Callable[[Sequence[RowWork]], bool]


def doom(swarm: Swarm, server: BlockServer, is_fatal: IsFatal) -> list[float]:
    """The server dies, without a farewell, in the first iteration that is fatal. Gives the times of its deaths."""
    loop, deaths = asyncio.get_running_loop(), list[float]()

    def die(rows: Sequence[RowWork]) -> None:
        if not deaths and is_fatal(rows):
            deaths.append(time.monotonic())
            asyncio.run_coroutine_threadsafe(swarm.crash(server), loop).result()

    plant_fault(server.engine.runner, before=die)
    return deaths


def beyond(position: int) -> IsFatal:
    """An iteration that computes the token at `position`."""
    return lambda rows: any(row.position <= position < row.position + row.num_tokens for row in rows)


async def answer_across_a_death(
    swarm: Swarm, client: AsyncClient, hop: int, position: int, prompt: str | list[int], **options: Any
) -> Generation:
    """The answer of a chain whose hop dies in the midst of it and is replaced once; it leaves nothing behind.

    Args:
        swarm: where all servers stand in the chain.
        client: asks.
        hop: the number of the server that dies.
        position: the token in whose iteration it dies.
        prompt: of the request.
        options: further options of the request.
    """
    victim = swarm.servers[hop]
    deaths = doom(swarm, victim, beyond(position))
    answering = asyncio.create_task(client.generate(prompt, **options))
    await until(lambda: deaths)
    await swarm.add_server(victim.settings.blocks)
    answer = await answering
    assert answer.usage.recoveries == 1
    swarm.servers.remove(victim)
    await swarm.until_empty()
    await victim.stop()
    return answer
