"""The newest recoveries of a client service, for watchers of the placement. The log names no sessions and no tenants.

Pure: the clock is passed in.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from corolla.chain.recovery_budget import RecoveryReport
from corolla.http.placement_facts import Moved, RecoveryFacts, name_of

MAX_ENTRIES: Final = 16
TOGETHER_S: Final = 5.0
"""Recoveries of the same cause and the same moves within this time are one entry."""


class RecoveryLog:
    """Holds the newest MAX_ENTRIES recoveries.

    Args:
        clock: returns the seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: deque[RecoveryFacts] = deque(maxlen=MAX_ENTRIES)
        self._num_entries = 0

    def __iter__(self) -> Iterator[RecoveryFacts]:
        """Iterates over the entries, oldest first."""
        return iter(self._entries)

    def add(self, report: RecoveryReport) -> None:
        """Adds a recovery that has just ended."""
        now_s, seconds = round(self._clock(), 3), round(report.seconds, 4)
        moved = [
            Moved(blocks=(each.blocks.start, each.blocks.end), lost=name_of(each.lost), found=name_of(each.found))
            for each in report.moved
        ]
        for index, entry in enumerate(self._entries):
            if (entry.cause, entry.moved) == (report.cause, moved) and now_s - entry.time < TOGETHER_S:
                together = {"answers": entry.answers + 1, "seconds": max(entry.seconds, seconds)}
                self._entries[index] = entry.model_copy(update=together)
                return
        self._num_entries += 1
        self._entries.append(
            RecoveryFacts(
                number=self._num_entries, time=now_s, cause=report.cause, answers=1, seconds=seconds, moved=moved
            )
        )
