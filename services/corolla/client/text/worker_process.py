"""Has work done in a process of its own, which ends where that runs away."""

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
"""A process that gives no answer for so long is ended: it was stopped, or has no processor."""

_INHERITED: Final = ("PATH", "PYTHON", "LANG", "LC_", "LD_", "VIRTUAL_ENV")
"""Beginnings of the names of variables that it inherits; others may hold secrets."""

_RAN_AWAY: Final = {
    -signal.SIGPROF: "too long",
    OUT_OF_MEMORY: "too much memory",
    -signal.SIGABRT: "too much memory",  # how libraries end that cannot have more
    -signal.SIGSEGV: "too much memory",  # of the stack
}


class RanAway(Exception):
    """Its text says what the work took: too long, or too much memory."""


class WorkerProcess:
    """One process, begun when it is first needed and again when it has ended. Safe to use from several threads.

    Args:
        module: what it runs; it calls `bounded_worker.serve`.
        beginning: its first message.
        purpose: what it is for.
        longest_wait_s: for the work before one's own, which has a second of a processor each.
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
        """None while it is not needed."""
        return self._process.pid if self._process is not None else None

    def ask(self, request: Any) -> Any:
        """What it answers.

        Raises:
            RanAway: it had to be ended, or ended itself.
            QueueFull: others' requests take too long.
            InternalError: the process ends again and again.
        """
        if not self._turn.acquire(timeout=self._longest_wait_s):
            raise QueueFull(f"others take the process that {self._purpose} too long")
        try:
            for _ in range(2):  # once more where somebody else ended it
                process = self._begun()
                with contextlib.suppress(OSError, EOFError):
                    return _answer(process, request)
                status = self._ended()
                self._begun()  # so that nobody waits for it
                if status in _RAN_AWAY:
                    raise RanAway(_RAN_AWAY[status])
                log.error(f"the process that {self._purpose} has ended", extra={"status": status})
            raise InternalError(f"the process that {self._purpose} ends again and again")
        finally:
            self._turn.release()

    def close(self) -> None:
        """Ends the process, and waits for that. Work that runs has its time."""
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
            with contextlib.suppress(OSError):  # whoever asks it notices that it has ended
                write(cast(IO[bytes], self._process.stdin), self._beginning)
        return self._process

    def _ended(self) -> int | None:
        """How the process ended, now at the latest; None where there was none."""
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
