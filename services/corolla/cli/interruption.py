"""Handles signals to a command: a signal stops a stack in order, or ends an answer early."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

EXIT_INTERRUPTED: Final = 130
INTERRUPTED: Final = "corolla: a signal ended the command before it was done; run it again to begin anew\n"

# The file name of the frames in which Python imports a module.
_IMPORTING: Final = "<frozen importlib._bootstrap>"


class Interrupted(BaseException):
    """A signal asked the command to end."""


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def imports_end_at_once() -> Iterator[None]:
    """Makes Ctrl-C end the process at once while it imports a module, and raise KeyboardInterrupt otherwise.

    An exception would not do: a library that is being imported takes it for a missing part of itself, and either goes
    on without that part or raises an ImportError.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == _IMPORTING:
                os.write(2, INTERRUPTED.encode())
                os._exit(EXIT_INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    with _handled((signal.SIGINT,), interrupt):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises Interrupted in the main thread at the first SIGINT, SIGTERM or SIGHUP, and ignores later ones.

    Outside the main thread, signals are left alone.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    with _handled(numbers, interrupt):
        yield


class Closable(Protocol):
    """A stream of chunks."""

    def close(self) -> None: ...


class Interruption:
    """Closes a stream when Ctrl-C comes, and records in `came` that it came."""

    def __init__(self) -> None:
        self.came = False
        self._stream: Closable | None = None

    def closes(self, stream: Closable) -> None:
        """Sets the stream that Ctrl-C closes; closes it at once if Ctrl-C came already."""
        self._stream = stream
        if self.came:
            stream.close()

    def signalled(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        if self._stream is not None:
            self._stream.close()


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Makes the first Ctrl-C close a stream, whose iteration then ends, and a second one raise KeyboardInterrupt.

    The first one raises nothing, since an exception while gRPC waits can leave gRPC's locks broken, and the next call
    would fail or hang. Outside the main thread, signals are left alone.
    """
    interrupted = Interruption()
    with _handled((signal.SIGINT,), interrupted.signalled):
        yield interrupted


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
