"""A service's life: start, run until a signal, stop in order; and supervised background tasks."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

from corolla.chassis.errors import StartupError
from corolla.chassis.handlers import where

log = logging.getLogger(__name__)

EXIT_STARTUP = 2


def run_until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs `serve(stopping)`; SIGTERM and SIGINT set `stopping`. Returns the exit status.

    A StartupError ends the process with its sentence on standard error and status 2.
    """

    async def main() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        await serve(stopping)

    try:
        uvloop.run(main())
    except StartupError as failure:
        sys.stderr.write(f"corolla: {failure.message}\n")
        return EXIT_STARTUP
    return 0


class TaskGroup:
    """Background tasks of one owner: held against the garbage collector, cancelled and awaited on close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("background task failed", extra={"task": task.get_name(), "where": where(failure)})

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
