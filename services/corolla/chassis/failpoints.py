"""Named places at which a process can be made to die, and tasks that can be made to fail, so that tests of faults hit
just the moment that they mean.

`COROLLA_FAILPOINT=before_send:12` ends the process with SIGKILL when it gets there for the twelfth time.
`COROLLA_FAILPOINT=fail:engine:12` raises InjectedFailure inside the task `engine` when it goes on for the twelfth time,
wherever it was waiting. `fail:engine:12@/tmp/now` counts from when that file exists, so that a test is ready first.
Without the variable nothing is counted, and passing a place costs a call of an empty function.
"""

import os
import re
import signal
from collections.abc import Callable, Coroutine, Generator, Mapping
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
"""Around the opening of a session on a hop, an iteration, the sending of its outputs, the writing back of a turn, a
heartbeat and a farewell."""

EssentialTask = Literal[
    "moves", "heartbeats", "engine", "housekeeping",  # block server
    "placement_statistics", "rebalancing", "placement_feed",  # router
    "http", "placement_watch",  # client service
]  # fmt: skip
RestartableTask = Literal[
    "issuer_keys", "kubernetes", "neighbours", "pod_tags", "quotas", "turn_lock", "watched_files",
]  # fmt: skip
Task = Literal[EssentialTask, RestartableTask]

Result = TypeVar("Result")


class InjectedFailure(BaseException):
    """What a background task fails of that was given to: a bug that no `except Exception` on its way catches."""


def _go_on(place: Place) -> None:
    """Nothing was asked for."""


def _as_it_is(task: str, work: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    """Nothing was asked for."""
    return work


_passed: Callable[[Place], None] = _go_on
_within: Callable[[str, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]] = _as_it_is


def passed(place: Place) -> None:
    """Says that the process has got to `place`."""
    _passed(place)


def within(task: str, work: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result]:
    """What the task of this name runs: `work`, and the failure where one was asked for."""
    return _within(task, work)


def arm(environment: Mapping[str, str]) -> None:
    """Reads what was asked for, at the start of a process. Raises SettingsError where it is no place and no task."""
    global _passed, _within
    _passed, _within = _go_on, _as_it_is
    given = environment.get(VARIABLE, "")
    if not given:
        return
    is_task = given.startswith(_FAIL)
    counted, _, starting_file = given.removeprefix(_FAIL).partition("@")
    wanted, _, count = counted.partition(":")
    if wanted not in get_args(Task if is_task else Place) or not re.fullmatch(r"[1-9][0-9]{0,8}", count or "1"):
        raise SettingsError(f"{VARIABLE}={given!r}: must be such as before_send, before_send:12 or fail:engine:12")
    num_left = int(count or "1")

    def is_now(name: str) -> bool:
        nonlocal num_left
        if name != wanted or (starting_file and not os.path.exists(starting_file)):
            return False
        num_left -= 1
        return num_left == 0

    def die(place: Place) -> None:
        if is_now(place):
            os.kill(os.getpid(), signal.SIGKILL)

    async def fail(task: str, work: Coroutine[Any, Any, Any]) -> Any:
        return await _Failing(work, lambda: is_now(task))

    if is_task:
        _within = fail
    else:
        _passed = die


class _Failing:
    """Awaits a coroutine; each time that it goes on, `is_now` says whether it gets the failure instead."""

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
