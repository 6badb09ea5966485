"""Failpoints: named places where tests can kill a process or make an essential task fail, at an exact moment.

`COROLLA_FAILPOINT=before_send:12` ends the process with SIGKILL when it reaches that place for the twelfth time.
`COROLLA_FAILPOINT=fail:engine:12` raises InjectedFailure inside the task `engine` when the event loop runs the task for
the twelfth time, at the `await` where the task waits. `fail:engine:12@/tmp/now` starts to count when that file exists,
so that a test can prepare first. Without the variable nothing is counted, and a place costs one function call.
"""

import os
import re
import signal
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from corolla.chassis.errors import SettingsError

VARIABLE: Final = "COROLLA_FAILPOINT"
_FAIL: Final = "fail:"

Place = Literal[
    "before_open", "after_open",
    "before_forward", "after_forward",
    "before_send", "after_send",
    "before_commit", "after_commit",
    "before_lease", "after_lease",
    "before_deregister", "after_deregister",
]  # fmt: skip
"""The places before and after these events: a session opens on a hop, an iteration runs, its outputs are sent, a turn
is written back, a heartbeat is sent, a server deregisters."""

EssentialTask = Literal[
    "moves", "heartbeats", "engine", "periodic_tasks",  # block server
    "placement_statistics", "rebalancing", "placement_feed",  # router
    "http", "placement_watch",  # client service
]  # fmt: skip

Result = TypeVar("Result")


class InjectedFailure(BaseException):
    """The injected failure of a background task. It stands for a bug that no `except Exception` in the task catches."""


@dataclass(slots=True)
class _Armed:
    """The armed failpoint: the name of a place or task, and how many more times it is passed until the failure."""

    name: str
    is_task: bool
    num_left: int
    starting_file: str

    def is_now(self, name: str) -> bool:
        if name != self.name or (self.starting_file and not os.path.exists(self.starting_file)):
            return False
        self.num_left -= 1
        return self.num_left == 0


_armed: _Armed | None = None


def passed(place: Place) -> None:
    """Marks that the process has reached `place`; kills the process if the armed failpoint is due."""
    if _armed is not None and not _armed.is_task and _armed.is_now(place):
        os.kill(os.getpid(), signal.SIGKILL)


def within(task: str, work: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result]:
    """Returns the `work` of a task, wrapped to fail at the armed failpoint; unchanged if no task's failpoint is armed.

    Args:
        task: The name of the task that runs `work`.
    """
    return _fail(work, partial(_armed.is_now, task)) if _armed is not None and _armed.is_task else work


def arm(environment: Mapping[str, str]) -> None:
    """Arms the failpoint of the environment, at the start of a process. Raises SettingsError for a bad value."""
    global _armed
    _armed = None
    given = environment.get(VARIABLE, "")
    if not given:
        return
    is_task = given.startswith(_FAIL)
    counted, _, starting_file = given.removeprefix(_FAIL).partition("@")
    wanted, _, count = counted.partition(":")
    if wanted not in get_args(EssentialTask if is_task else Place) or not re.fullmatch(
        r"[1-9][0-9]{0,8}", count or "1"
    ):
        raise SettingsError(f"{VARIABLE}={given!r}: must be such as before_send, before_send:12 or fail:engine:12")
    _armed = _Armed(wanted, is_task, int(count or "1"), starting_file)


async def _fail(work: Coroutine[Any, Any, Any], is_now: Callable[[], bool]) -> Any:
    return await _Failing(work, is_now)


class _Failing:
    """Awaits a coroutine; each time that it would run on, `is_now` decides whether InjectedFailure is raised in it."""

    def __init__(self, work: Coroutine[Any, Any, Any], is_now: Callable[[], bool]) -> None:
        self._work = work
        self._is_now = is_now

    def __await__(self) -> Generator[Any, Any, Any]:
        go_on = partial(self._work.send, None)
        while True:
            try:
                awaited = self._work.throw(InjectedFailure()) if self._is_now() else go_on()
            except StopIteration as end:
                return end.value
            try:
                go_on = partial(self._work.send, (yield awaited))
            except BaseException as raised:
                go_on = partial(self._work.throw, raised)
