"""Notices when processes of a running stack die, reports it, and starts them again."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from corolla.chassis.backoff import Backoff
from corolla.local.fork_server import Exit
from corolla.local.processes import ManagedProcess

if TYPE_CHECKING:
    from corolla.local.stack import Stack

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class StackEvent:
    """An event of a stack.

    Attributes:
        kind: a "step" of the start, "ready" at its end, a "problem", or "recovered" after a problem.
        source: the name of the process that the event is about, or "model" or "stack".
        text: a description for people.
    """

    kind: Literal["step", "ready", "problem", "recovered"]
    source: str
    text: str


Report = Callable[[StackEvent], None]


def ignore(_event: StackEvent) -> None:
    """A `Report` that drops the event."""


class Supervisor:
    """A thread that watches the processes of a running stack.

    Args:
        report: is called with each problem and restart.
    """

    def __init__(self, stack: "Stack", report: Report) -> None:
        self._stack = stack
        self._report = report
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
                self._report(StackEvent("recovered", name, "serves again"))

    def _take_note(self, process: ManagedProcess, ended: Exit) -> None:
        name = process.name
        self._coming_up.discard(name)
        text = f"(process {ended.pid}) {ended.how}"
        if self._stack.options.restarts:
            now = time.monotonic()
            delay_s = self._backoffs[name].delay_s(now - self._started_at[name])
            self._due_at[name] = now + delay_s
            text += f"; starting it again in {delay_s:.1f} s"
        self._report(StackEvent("problem", name, text))
