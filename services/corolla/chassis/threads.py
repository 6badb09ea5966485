"""Runs calls in threads of their own, so that those who wait can stop waiting."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begun_apart(call: Callable[[], Result]) -> Future[Result]:
    """Begins a call in a thread of its own, which ends with this process.

    A main thread that waits for the result gets no Interrupted while gRPC waits, which could leave gRPC's locks broken.
    The call runs to its end even if nothing waits for it any more.
    """
    result = Future[Result]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as failure:
            result.set_exception(failure)

    threading.Thread(target=run, name="apart from signals", daemon=True).start()
    return result
