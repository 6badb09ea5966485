"""A service's life: settings, start, run until a signal, stop in order; and supervised background tasks."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

import uvloop

from corolla.chassis import failpoints, logs
from corolla.chassis.errors import StartupError
from corolla.chassis.handlers import where
from corolla.chassis.settings import ServiceSettings, load

log = logging.getLogger(__name__)

EXIT_STARTUP = 2


class Service(Protocol):
    """What a composition root builds."""

    async def start(self) -> None:
        """Returns when the service serves. Raises StartupError when it cannot."""

    async def stop(self) -> None:
        """Frees everything, also after a start that failed or was cut short."""


Settings = TypeVar("Settings", bound=ServiceSettings)

_CANCEL_AGAIN_S: Final = 5.0

# Of the service that this process runs.
_stops: list[Callable[[], None]] = []


def ask_to_stop() -> None:
    """Has this process' service stop, as a first signal does. Where it stops already, nothing happens."""
    for stop in _stops:
        stop()


def run_service(settings_class: type[Settings], build: Callable[[Settings], Service], /, **overrides: Any) -> int:
    """Reads the settings, builds the service and runs it until SIGTERM or SIGINT. Returns the exit status.

    A second signal does not wait for the service's end: the process dies by it.

    A StartupError ends the process with its sentence on standard error and status 2.
    """
    try:
        settings = load(settings_class, **overrides)
        failpoints.arm(os.environ)
        logs.configure(settings.log_level, settings.log_format)
        uvloop.run(_serve_until_signal(lambda: build(settings)))
    except StartupError as failure:
        sys.stderr.write(f"corolla: {failure.message}\n")
        return EXIT_STARTUP
    return 0


async def _serve_until_signal(build: Callable[[], Service]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_signalled = False

    def stop(number: signal.Signals) -> None:
        nonlocal is_signalled
        if not is_signalled:
            log.info("stopping; once more ends it at once")
            is_signalled = True
            stopping.set()
            return
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    _stops.append(stopping.set)
    service = build()
    starting = asyncio.create_task(service.start())
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await waiting
    finally:
        for task in (starting, waiting):
            task.cancel()
        await asyncio.gather(starting, waiting, return_exceptions=True)
        await service.stop()
        _stops.remove(stopping.set)


class TaskGroup:
    """Background tasks of one owner: held against the garbage collector, cancelled and awaited on close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs `work` until it ends or the group closes; a failure is logged, not raised."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("background task failed", extra={"task": task.get_name(), "where": where(failure)})

    async def close(self) -> None:
        """Cancels all tasks and waits for their ends.

        More than once, if need be: before Python 3.12, `asyncio.wait_for` loses a cancellation that comes together with
        what was waited for, and libraries use it.
        """
        tasks = set(self._tasks)
        while tasks:
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
