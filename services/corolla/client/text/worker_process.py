"""Runs work in a process of its own, which is ended if the work takes too long or too much memory."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any, Final, cast

from corolla.chassis.errors import InternalError, QueueFull
from corolla.client.text.bounded_worker import OUT_OF_MEMORY, read, write

log = logging.getLogger(__name__)

LONGEST_S: Final = 10.0
"""A process that does not answer for this long is killed: something stopped it, or it gets no processor time."""

_INHERITED: Final = ("PATH", "PYTHON", "LANG", "LC_", "LD_", "VIRTUAL_ENV")
"""The process inherits the environment variables whose names begin so; others may hold secrets."""

_EXCEEDED: Final = {
    -signal.SIGPROF: "too long",
    OUT_OF_MEMORY: "too much memory",
    -signal.SIGABRT: "too much memory",  # libraries abort when an allocation fails
    -signal.SIGSEGV: "too much memory",  # the stack overflowed
}


class WorkLimitExceeded(Exception):
    """The work took too much time or memory; the message is "too long" or "too much memory"."""


class WorkerProcess:
    """One process, which a request starts if it does not run. Safe to use from several threads.

    Args:
        module: the module that the process runs; it calls `bounded_worker.serve`.
        longest_wait_s: seconds to wait for earlier requests, each of which may take a second of processor time.
    """

    def __init__(self, module: str, beginning: Any, purpose: str, *, longest_wait_s: float = 10.0) -> None:
        self._module = module
        self._beginning = beginning
        self._purpose = purpose
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._longest_wait_s = longest_wait_s

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first request starts it."""
        return self._process.pid if self._process is not None else None

    def ask(self, request: Any) -> Any:
        """Sends a request to the process and returns the answer.

        Raises:
            WorkLimitExceeded: the work took too long or too much memory, and the process was ended.
            QueueFull: other callers' requests take too long.
            InternalError: the process ends again and again.
        """
        if not self._turn.acquire(timeout=self._longest_wait_s):
            raise QueueFull(f"other requests keep the process that {self._purpose} busy for too long")
        try:
            for _ in range(2):  # a second try, in case something else ended the process
                process = self._begun()
                with contextlib.suppress(OSError, EOFError):
                    return _answer(process, request)
                status = self._ended()
                self._begun()  # the next request need not wait for the start
                if status in _EXCEEDED:
                    raise WorkLimitExceeded(_EXCEEDED[status])
                log.error(f"the process that {self._purpose} has ended", extra={"status": status})
            raise InternalError(f"the process that {self._purpose} ends again and again")
        finally:
            self._turn.release()

    def close(self) -> None:
        """Waits for running work, then ends the process."""
        with self._turn:
            self._ended()

    def _begun(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if name.startswith(_INHERITED)},
            )
            with contextlib.suppress(OSError):  # the next request notices that the process has ended
                write(cast(IO[bytes], self._process.stdin), self._beginning)
        return self._process

    def _ended(self) -> int | None:
        """Ends the process and returns its exit status; None if there was no process."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(OSError):
            cast(IO[bytes], process.stdin).close()
        cast(IO[bytes], process.stdout).close()
        try:
            return process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _answer(process: subprocess.Popen[bytes], request: Any) -> Any:
    guard = threading.Timer(LONGEST_S, process.kill)
    guard.start()
    try:
        write(cast(IO[bytes], process.stdin), request)
        return read(cast(IO[bytes], process.stdout))[0]
    finally:
        guard.cancel()
