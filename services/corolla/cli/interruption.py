"""Ctrl-C and SIGTERM as one exception, so that a stack is stopped in order whichever came."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 130


class Interrupted(BaseException):
    """Somebody wants the command to end."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises Interrupted in the main thread at the first SIGINT or SIGTERM; later ones do not disturb the stopping.

    Outside the main thread, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
