"""What a stack tells about itself while it starts, runs and stops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StackEvent:
    """One thing that happened.

    Attributes:
        kind: a "step" of the start, "ready" at its end, a "problem", or what was "recovered".
        source: the process that it is about, "model" or "stack".
        text: for people.
    """

    kind: Literal["step", "ready", "problem", "recovered"]
    source: str
    text: str


Report = Callable[[StackEvent], None]


def ignore(_event: StackEvent) -> None:
    """Reports nothing."""
