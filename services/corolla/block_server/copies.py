"""Copies of keys and values that wait for their turn between iterations."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

Copied = TypeVar("Copied")


class CopyQueue:
    """First come, first served; between two of them an iteration has its turn.

    Args:
        compute_thread: of the engine.
        wake: of the engine, which sleeps when there is nothing to do.
    """

    def __init__(self, compute_thread: Executor, wake: asyncio.Event) -> None:
        self._compute_thread = compute_thread
        self._wake = wake
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def make(self, work: Callable[[], Copied]) -> Copied:
        """Runs `work` in the compute thread while no session is computed or changed, and raises what it raises.

        Steps wait meanwhile, so it should be short.
        """
        future: asyncio.Future[Copied] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        self._wake.set()
        return await future

    async def make_next(self) -> None:
        """For the engine: the one that waits longest, if any does."""
        if not self._waiting:
            return
        work, future = self._waiting.popleft()
        if future.done():
            return  # nobody waits any more
        try:
            copied = await asyncio.get_running_loop().run_in_executor(self._compute_thread, work)
        except Exception as failure:
            if not future.done():
                future.set_exception(failure)
            return
        if not future.done():
            future.set_result(copied)
