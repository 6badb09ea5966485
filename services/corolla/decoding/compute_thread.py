"""The thread in which this process computes: embedding, head and sampling, one job after another."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from prometheus_client import Counter

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class ComputeThread:
    """Keeps torch off the event loop; `busy_seconds` counts the time in which the thread works."""

    def __init__(self, busy_seconds: Counter) -> None:
        self._busy_seconds = busy_seconds
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def submit(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Runs `work` in the thread. Cancelling the wait does not stop work that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work, args)

    def _timed(self, work: Callable[..., Result], args: tuple[object, ...]) -> Result:
        started = time.perf_counter()
        try:
            return work(*args)
        finally:
            self._busy_seconds.inc(time.perf_counter() - started)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
