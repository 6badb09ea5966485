"""What a stack tells about itself while it starts, runs and stops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StackEvent:
    """One thing that happened.

    Attributes:
        kind: a "step" of the start, "progress" of a long one, "ready" at its end, a "problem", or what was "recovered".
        source: the process that it is about, "model" or "stack".
        text: for people.
        fraction: done, from 0.0 to 1.0; for "progress".
    """

    kind: Literal["step", "progress", "ready", "problem", "recovered"]
    source: str
    text: str
    fraction: float | None = None


Report = Callable[[StackEvent], None]


def ignore(_event: StackEvent) -> None:
    """Reports nothing."""
