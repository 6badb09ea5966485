"""What a start has done so far, stage by stage, and how long each stage took."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STAGES: Final = ("ports", "device", "model", "kernels", "place", "weights", "keys and values", "step", "serving")
"""The stages of a start, in order."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage that has ended.

    Attributes:
        name: one of `STAGES`.
        seconds: how long it took.
        found: what it found, for people; empty: nothing worth saying.
    """

    name: str
    seconds: float
    found: str


class StartStages:
    """The stages of one start. Whatever raises leaves its stage open, so the open one is the one that failed.

    Attributes:
        ended: the stages that have ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ended: list[Stage] = []
        self._clock = clock
        self._began_s = clock()

    def end(self, found: str = "") -> None:
        """Ends the open stage; the next one is open from now on."""
        now_s = self._clock()
        self.ended.append(Stage(STAGES[len(self.ended)], now_s - self._began_s, found))
        self._began_s = now_s

    @property
    def open(self) -> str | None:
        """The stage that is under way; None: the server serves."""
        return STAGES[len(self.ended)] if len(self.ended) < len(STAGES) else None
