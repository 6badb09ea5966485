"""Notices processes of a running stack that died, says so, and starts them again."""

import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corolla.local.events import Report, StackEvent
from corolla.local.nursery import Exit
from corolla.local.processes import ManagedProcess

if TYPE_CHECKING:
    from corolla.local.stack import Stack

_POLL_S = 0.2


@dataclass
class Backoff:
    """How long to wait before the next start: doubled with each early death, forgotten after a long life.

    Attributes:
        first_s: seconds before the first restart.
        most_s: seconds at most.
        healthy_s: a process that lived so long counts as healthy.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0
    _next_s: float = 0.0

    def delay_s(self, lived_s: float) -> float:
        if lived_s >= self.healthy_s or not self._next_s:
            self._next_s = self.first_s
        delay_s = self._next_s
        self._next_s = min(2 * self._next_s, self.most_s)
        return delay_s


class Supervisor:
    """A thread beside a running stack."""

    def __init__(self, stack: "Stack", report: Report, *, restarts: bool) -> None:
        self._stack = stack
        self._report = report
        self._restarts = restarts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._processes = {process.name: process for process in stack.processes}
        self._backoffs = {name: Backoff() for name in self._processes}
        self._started_at = dict.fromkeys(self._processes, time.monotonic())
        self._due_at: dict[str, float] = {}
        self._coming_up: set[str] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            for ended in self._stack.take_exits():
                if (process := self._processes.get(ended.name)) is not None:
                    self._take_note(process, ended)
            now = time.monotonic()
            for name in [name for name, due_at in self._due_at.items() if due_at <= now]:
                del self._due_at[name]
                self._started_at[name] = now
                self._coming_up.add(name)
                self._stack.launch(self._processes[name])
            for name in [name for name in self._coming_up if self._stack.is_serving(name)]:
                self._coming_up.discard(name)
                self._report(StackEvent("mended", name, "serves again"))

    def _take_note(self, process: ManagedProcess, ended: Exit) -> None:
        name = process.name
        self._coming_up.discard(name)
        text = f"(process {ended.pid}) {describe_exit(ended.status)}"
        if self._restarts:
            now = time.monotonic()
            delay_s = self._backoffs[name].delay_s(now - self._started_at[name])
            self._due_at[name] = now + delay_s
            text += f"; starting it again in {delay_s:.1f} s"
        self._report(StackEvent("problem", name, text))


def describe_exit(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
