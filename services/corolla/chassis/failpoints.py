"""Named places at which a process can be told to die, so that tests of faults hit just the moment that they mean.

`COROLLA_FAILPOINT=before_send:12` ends the process with SIGKILL when it gets there for the twelfth time. Without the
variable nothing is counted, and passing a place costs a call of an empty function.
"""

import os
import re
import signal
from collections.abc import Callable, Mapping
from typing import Final, Literal, get_args

from corolla.chassis.errors import SettingsError

VARIABLE: Final = "COROLLA_FAILPOINT"

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


def _go_on(place: Place) -> None:
    """Nothing was asked for."""


_passed: Callable[[Place], None] = _go_on


def passed(place: Place) -> None:
    """Says that the process has got to `place`."""
    _passed(place)


def arm(environment: Mapping[str, str]) -> None:
    """Reads what was asked for, at the start of a process. Raises SettingsError where there is no such place."""
    global _passed
    _passed = _go_on
    given = environment.get(VARIABLE, "")
    if not given:
        return
    wanted, _, count = given.partition(":")
    if wanted not in get_args(Place) or not re.fullmatch(r"[1-9][0-9]{0,8}", count or "1"):
        raise SettingsError(f"{VARIABLE}={given!r}: must be a place such as before_send, or before_send:12")
    num_left = int(count or "1")

    def count_down(place: Place) -> None:
        nonlocal num_left
        if place == wanted:
            num_left -= 1
            if num_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    _passed = count_down
