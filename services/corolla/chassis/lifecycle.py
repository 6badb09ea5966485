"""Runs a service: reads its settings, starts it, waits for a signal and stops it in order, or ends it at a failure."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import uvloop

from corolla.chassis import descriptors, exposure, failpoints, heap, logs
from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import StartupError
from corolla.chassis.settings import REMOVED, ServiceSettings, load
from corolla.chassis.tracing import export

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_STARTUP = 2


class Service(Protocol):
    """A service as its composition root builds it."""

    async def start(self) -> None:
        """Starts the service, and returns when it serves. Raises StartupError when it cannot."""

    async def stop(self) -> None:
        """Frees everything, also after a start that failed or was cancelled."""


Settings = TypeVar("Settings", bound=ServiceSettings)

# How long a failed process stays, so that its last health status reaches the watchers.
_HEALTH_DELIVERY_S: Final = 0.1
# The time after which a failed process ends even if its event loop is stuck.
_FAILED_WITHIN_S: Final = 0.8

# The functions that stop the service of this process, and the tasks that end the process.
_stops: list[Callable[[], None]] = []
_ends: set[asyncio.Task[None]] = set()


def ask_to_stop() -> None:
    """Stops this process' service, like a first signal. Does nothing if the service is stopping already."""
    for stop in _stops:
        stop()


def fail(say_not_serving: Callable[[], Awaitable[None]]) -> None:
    """Ends the process with status 1 within a second, after an essential part of the service has failed.

    The health service says NOT_SERVING first. The service hands no session over, since that would need the failed part.
    Peers see their streams break at once and recover the sessions, as after any crash.

    If `run_service` does not run this process, as in tests, the process goes on, and only health says NOT_SERVING.
    """
    is_own = bool(_stops)
    if is_own:
        timer = threading.Timer(_FAILED_WITHIN_S, os._exit, (EXIT_FAILED,))
        timer.daemon = True
        timer.start()

    async def end() -> None:
        try:
            await say_not_serving()
            await asyncio.sleep(_HEALTH_DELIVERY_S)
        finally:
            if is_own:
                os._exit(EXIT_FAILED)

    task = asyncio.get_running_loop().create_task(end())
    _ends.add(task)
    task.add_done_callback(_ends.discard)


def run_service(settings_class: type[Settings], build: Callable[[Settings], Service], /, **overrides: Any) -> int:
    """Reads the settings, builds the service and runs it until SIGTERM or SIGINT. Returns the exit status.

    A second signal ends the process at once.

    After a StartupError, the process writes the error's message to standard error and returns status 2. The failure of
    an essential part ends the process with status 1.
    """
    try:
        settings = load(settings_class, **overrides)
        exposure.check(settings)
        failpoints.arm(os.environ)
        os.environ.setdefault(*TLS_1_3_ONLY)
        descriptors.raise_limit()
        logs.configure(settings.log_level, settings.log_format, with_audit=settings.audit)
        for variable in sorted(REMOVED.keys() & os.environ.keys()):
            facts = {"variable": variable, "instead": REMOVED[variable]}
            log.warning("ignoring a variable that is no longer a setting", extra=facts)
        stop_tracing = export.start(settings.service_name)
        try:
            uvloop.run(_serve_until_signal(settings, build))
        finally:
            stop_tracing()
    except StartupError as failure:
        sys.stderr.write(f"corolla: {failure.message}\n")
        return EXIT_STARTUP
    return 0


async def _serve_until_signal(settings: Settings, build: Callable[[Settings], Service]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_signalled = False

    def stop(number: signal.Signals) -> None:
        nonlocal is_signalled
        if not is_signalled:
            log.info("stopping; a second signal ends the process at once")
            is_signalled = True
            stopping.set()
            return
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    _stops.append(stopping.set)
    service = build(settings)
    reminding = asyncio.create_task(exposure.remind(settings))
    starting = asyncio.create_task(service.start())
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            heap.settle()
            await waiting
    finally:
        tasks = (reminding, starting, waiting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.stop()
        _stops.remove(stopping.set)
