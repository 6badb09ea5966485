"""Watches processes of this machine that were started, and starts those again that die."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from corolla.chassis.backoff import Backoff
from corolla.chassis.errors import CorollaError
from corolla.chassis.threads import begun_apart
from corolla.local.fork_server import Exit
from corolla.local.processes import ManagedProcess

_LOOK_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class StackEvent:
    """An event of a stack.

    Attributes:
        kind: a "step" of the start, "ready" at its end, a "problem", or "recovered" after a problem.
        source: the name of the process that the event is about, or "model", "stack" or "join".
        text: a description for people.
    """

    kind: Literal["step", "ready", "problem", "recovered"]
    source: str
    text: str


Report = Callable[[StackEvent], None]


def ignore(_event: StackEvent) -> None:
    """A `Report` that drops the event."""


class Supervised(Protocol):
    """What a supervisor watches; its thread calls these methods, and a thread of its own calls `note_exit`."""

    @property
    def processes(self) -> tuple[ManagedProcess, ...]: ...

    def launch(self, process: ManagedProcess) -> None:
        """Starts a process, or starts it again."""

    def is_serving(self, name: str) -> bool:
        """The process answers that it is ready."""

    def take_exits(self) -> list[Exit]:
        """Returns the ends of processes since the last call."""

    def note_exit(self, process: ManagedProcess) -> None:
        """Does what has to be done at once when a process has ended, but nothing waits for it for long.

        Raises:
            CorollaError: it cannot be done. The process is started again all the same.
        """

    def look(self, report: Report) -> None:
        """Does what else has to be done again and again."""


class Supervisor:
    """A thread that watches processes which have been started.

    Args:
        report: is called with each problem, each restart, and when a process serves.
        restarts: whether a process that dies is started again.
        are_serving: whether the processes serve already.
    """

    def __init__(self, supervised: Supervised, report: Report, *, restarts: bool, are_serving: bool) -> None:
        self._supervised = supervised
        self._report = report
        self._restarts = restarts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._processes = {process.name: process for process in supervised.processes}
        self._backoffs = {name: Backoff() for name in self._processes}
        self._started_at = dict.fromkeys(self._processes, time.monotonic())
        self._due_at: dict[str, float] = {}
        self._coming_up = set[str]() if are_serving else set(self._processes)
        self._have_served = set(self._processes) - self._coming_up

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_INTERVAL_S):
            self._supervised.look(self._report)
            for ended in self._supervised.take_exits():
                if (process := self._processes.get(ended.name)) is not None:
                    self._take_note(process, ended)
            now = time.monotonic()
            for name in [name for name, due_at in self._due_at.items() if due_at <= now]:
                del self._due_at[name]
                self._started_at[name] = now
                self._coming_up.add(name)
                self._supervised.launch(self._processes[name])
            for name in [name for name in self._coming_up if self._supervised.is_serving(name)]:
                self._coming_up.discard(name)
                if name in self._have_served:
                    self._report(StackEvent("recovered", name, "serves again"))
                else:
                    self._have_served.add(name)
                    self._report(StackEvent("ready", name, "serves"))

    def _take_note(self, process: ManagedProcess, ended: Exit) -> None:
        name = process.name
        self._coming_up.discard(name)
        text = f"(process {ended.pid}) {ended.how}"
        if self._restarts:
            now = time.monotonic()
            delay_s = self._backoffs[name].delay_s(now - self._started_at[name])
            self._due_at[name] = now + delay_s
            text += f"; starting it again in {delay_s:.1f} s"
        # Neither a wrong file nor a router that does not answer keeps this thread from what follows.
        with suppress(CorollaError, TimeoutError):
            begun_apart(partial(self._supervised.note_exit, process)).result(_LOOK_INTERVAL_S)
        self._report(StackEvent("problem", name, text))
