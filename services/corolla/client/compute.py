"""The thread in which this process computes: embedding, head and sampling, one job after another."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ComputeThread:
    """Keeps torch off the event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch")

    async def run(
        self, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Runs `work` in the thread. Cancelling the wait does not stop work that has begun."""
        if kwargs:
            raise TypeError("jobs take positional arguments only")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
