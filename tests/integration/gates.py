"""Tests and block servers wait for each other."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from corolla.block_server.service import BlockServer
from corolla.compute.base import RowWork
from tests.faulty_runner import plant_fault
from tests.integration.swarm import Swarm
from tests.integration.waiting import until


@contextmanager
def held_up(server: BlockServer) -> Iterator[None]:
    """No answer through the server ends meanwhile, however long what the test does takes.

    The server waits only where it computes: it says that it lives, so no client gives it up.
    """
    may_go_on = threading.Event()

    def wait(rows: Sequence[RowWork]) -> None:
        may_go_on.wait(30)

    restore = plant_fault(server.engine.runner, before=wait)
    try:
        yield
    finally:
        restore()
        may_go_on.set()


async def until_held(server: BlockServer, count: int, num_tokens: int = 0) -> None:
    """Until it has so many sessions, of which the longest has more than so many tokens."""

    async def is_held() -> bool:
        lengths = [session.cache.num_tokens for session in server.sessions]
        return len(lengths) == count and max(lengths, default=0) > num_tokens

    await until(is_held)


async def hand_over(
    swarm: Swarm, number: int, num_tokens: int = 0, *, num_sessions: int = 1
) -> tuple[BlockServer, BlockServer]:
    """A server leaves, as soon as it holds so much, and one that just came takes its sessions; gives the two."""
    leaving = swarm.servers.pop(number)
    await until_held(leaving, num_sessions, num_tokens)
    with held_up(leaving):
        taker = await swarm.add_server(leaving.settings.blocks)
    await asyncio.wait_for(leaving.stop(), 60)
    return leaving, taker
