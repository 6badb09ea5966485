"""Runs calls in threads of their own, so that signals do not come while gRPC waits."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begun_apart(call: Callable[[], Result]) -> Future[Result]:
    """Begins a call in a thread of its own, which ends with this process.

    The main thread waits for the result, so that Interrupted never comes while gRPC waits: that could leave its locks
    broken.
    """
    result = Future[Result]()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as failure:
            result.set_exception(failure)

    threading.Thread(target=run, name="apart from signals", daemon=True).start()
    return result
