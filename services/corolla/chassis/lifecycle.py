"""A service's life: settings, start, run until a signal, stop in order; or fail, and end at once."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import uvloop

from corolla.chassis import exposure, failpoints, heap, logs
from corolla.chassis.channels import TLS_1_3_ONLY
from corolla.chassis.errors import StartupError
from corolla.chassis.settings import REMOVED, ServiceSettings, load
from corolla.chassis.tracing import export

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_STARTUP = 2


class Service(Protocol):
    """What a composition root builds."""

    async def start(self) -> None:
        """Returns when the service serves. Raises StartupError when it cannot."""

    async def stop(self) -> None:
        """Frees everything, also after a start that failed or was cut short."""


Settings = TypeVar("Settings", bound=ServiceSettings)

# In which health's last word reaches those who watch it.
_LAST_WORD_S: Final = 0.1
# The end comes then also where the event loop is stuck.
_FAILED_WITHIN_S: Final = 0.8

# Of the service that this process runs.
_stops: list[Callable[[], None]] = []
_ends: set[asyncio.Task[None]] = set()


def ask_to_stop() -> None:
    """Has this process' service stop, as a first signal does. Where it stops already, nothing happens."""
    for stop in _stops:
        stop()


def fail(say_not_serving: Callable[[], Awaitable[None]]) -> None:
    """An essential part of the service has failed: health says so, and the process ends with status 1 within a second.

    Nothing is handed over, which would need the part that is gone. Peers see their streams break at once and recover
    the sessions, as after any death.

    A service that is not this process' own, as where tests run several in one, stays there and says NOT_SERVING.
    """
    is_own = bool(_stops)
    if is_own:
        timer = threading.Timer(_FAILED_WITHIN_S, os._exit, (EXIT_FAILED,))
        timer.daemon = True
        timer.start()

    async def end() -> None:
        try:
            await say_not_serving()
            await asyncio.sleep(_LAST_WORD_S)
        finally:
            if is_own:
                os._exit(EXIT_FAILED)

    task = asyncio.get_running_loop().create_task(end())
    _ends.add(task)
    task.add_done_callback(_ends.discard)


def run_service(settings_class: type[Settings], build: Callable[[Settings], Service], /, **overrides: Any) -> int:
    """Reads the settings, builds the service and runs it until SIGTERM or SIGINT. Returns the exit status.

    A second signal does not wait for the service's end: the process dies by it.

    A StartupError ends the process with its sentence on standard error and status 2, the failure of an essential part
    with status 1.
    """
    try:
        settings = load(settings_class, **overrides)
        exposure.check(settings)
        failpoints.arm(os.environ)
        os.environ.setdefault(*TLS_1_3_ONLY)
        logs.configure(settings.log_level, settings.log_format, with_audit=settings.audit)
        for variable in sorted(REMOVED & os.environ.keys()):
            log.warning("this variable is no setting any more, and changes nothing", extra={"variable": variable})
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
