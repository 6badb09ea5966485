"""The newest recoveries of a client service, for people who watch. Nothing in it tells whose sessions they were.

Pure: the clock is passed in.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from corolla.chain.moved_blocks import MovedBlocks
from corolla.chain.recovery_budget import RecoveryReport

MAX_ENTRIES: Final = 16
TOGETHER_S: Final = 5.0
"""Sessions that lose the same servers within this time are one entry."""


@dataclass(frozen=True, slots=True)
class RecoveryEntry:
    """What happened to one session, or to several at once.

    Attributes:
        number: counts entries, from 1.
        began_s: when the first session continued, in seconds since 1970.
        seconds: from the failure until the session that took longest continued.
    """

    number: int
    began_s: float
    cause: str
    moved: tuple[MovedBlocks, ...]
    num_sessions: int
    seconds: float


class RecoveryLog:
    """Holds MAX_ENTRIES.

    Args:
        clock: in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[RecoveryEntry] = deque(maxlen=MAX_ENTRIES)
        self._num_entries = 0

    def __iter__(self) -> Iterator[RecoveryEntry]:
        """Oldest first."""
        return iter(self._entries)

    def add(self, report: RecoveryReport) -> None:
        """A session has recovered just now."""
        now_s = self._clock()
        for index, entry in enumerate(self._entries):
            is_alike = (entry.cause, entry.moved) == (report.cause, report.moved)
            if is_alike and now_s - entry.began_s < TOGETHER_S:
                self._entries[index] = replace(
                    entry, num_sessions=entry.num_sessions + 1, seconds=max(entry.seconds, report.seconds)
                )
                return
        self._num_entries += 1
        entry = RecoveryEntry(self._num_entries, now_s, report.cause, report.moved, 1, report.seconds)
        self._entries.append(entry)
