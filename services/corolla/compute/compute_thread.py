"""The one thread in which torch computes with all of the process's compute threads.

OpenMP keeps helper threads for each thread that ever used some. If a process has more helpers than CPUs, libgomp lets
them sleep after each product instead of spinning until the next one, and a step takes twice as long. So one thread
computes, from the first measurement to the last step, and the other threads have no helpers.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from corolla.compute.threads import single_threaded_pool

Result = TypeVar("Result")

_NUM_OTHERS: Final = min(16, (os.cpu_count() or 1) + 4)


class ComputeThread:
    """A thread that does work in the order of the calls.

    Attributes:
        current: the number of the work that runs, counted from 1; 0 while no work runs.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._num_begun = 0
        self.current = 0

    def run(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> "asyncio.Future[Result]":
        """Queues work. Returns a future of the running loop with the work's result."""
        return asyncio.get_running_loop().run_in_executor(
            self._executor, partial(self._work, partial(work, *arguments, **options))
        )

    def _work(self, work: Callable[[], Result]) -> Result:
        self._num_begun += 1
        self.current = self._num_begun
        try:
            return work()
        finally:
            self.current = 0

    def close(self) -> None:
        """Waits for the work that runs, and cancels the work that has not begun."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def let_others_compute_alone() -> None:
    """Gives the running event loop threads for `asyncio.to_thread` that compute without helpers."""
    asyncio.get_running_loop().set_default_executor(single_threaded_pool(_NUM_OTHERS, "work"))
