"""Which transitions of a session on a hop the seeds took, over all processes in which their parts ran."""

from collections.abc import Iterable, Sequence
from typing import Final

import pytest

from corolla.block_server.hop_session import TRANSITIONS, SessionEvent, SessionState

NUM_PARTS: Final = 20
"""The number of parts in which `make test-all` runs its seeds."""

PROPERTY: Final = "transitions"
"""The name by which a part of the seeds records its transitions."""

MOST_NOT_TAKEN: Final = 10
"""The number of transitions, of 47, that all the seeds of `make test-all` together may leave out.

None is impossible: a few thousand seeds take each. Those that 500 seeds may miss need two events within a few
hundredths of a second:

- what a client does at the very end of a turn, or at its death: "turn ended" and "stream ended" while arriving,
  unclaimed, orphaned, leaving or "leaving, parked";
- a server that holds what its client could not reach it to free: "offered" while running or parked;
- a damaged last part: "last part read" while leaving or "leaving, parked";
- an open of a standby that its client takes back: "turn ended" while a standby. Its stream's end frees it.
"""


def in_words(transition: tuple[SessionState, SessionEvent]) -> str:
    state, event = transition
    return f"{event.value} while {state.value}"


def not_taken(taken: Iterable[str]) -> list[str]:
    """All others of the table, in its order."""
    known = {*taken}
    every = [in_words((state, event)) for state in TRANSITIONS for event in TRANSITIONS[state]]
    return [each for each in every if each not in known]


def of_parts(reports: Sequence[pytest.TestReport]) -> list[str] | None:
    """What no part of the seeds took; None where not all of them ran and held."""
    if len(reports) < NUM_PARTS:
        return None
    values = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    return not_taken(transition for value in values if isinstance(value, list) for transition in value)
