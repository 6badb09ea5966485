"""The thread in which torch computes with as many threads as this process has for it.

OpenMP keeps helpers for each thread that ever asked for some. With more of them in a process than it may use
processors, libgomp lets helpers sleep after each product instead of waiting for the next one, and a step takes twice as
long. So one thread computes, from the first block that is tried out to the last step; others have no helpers.
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
    """One thread; work is done in the order of the calls."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    def run(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> "asyncio.Future[Result]":
        """Its result, on the running loop."""
        return asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *arguments, **options))

    def close(self) -> None:
        """Waits for the work that runs; what has not begun never will."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def let_others_compute_alone() -> None:
    """Gives the running loop threads for `asyncio.to_thread` that compute without helpers."""
    asyncio.get_running_loop().set_default_executor(single_threaded_pool(_NUM_OTHERS, "work"))
