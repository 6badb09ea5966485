"""Blocking work beside the event loop, in threads that the end of the process does not wait for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """The result of `work`, or what it raised. Cancelled, it leaves the work to end by itself."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as failure:
            outcome.set_exception(failure)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Has the loop call it, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
