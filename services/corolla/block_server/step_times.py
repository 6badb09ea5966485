"""Averages the times of decode steps and predicts the next one, from which the engine chooses a thread for the step.

Pure: times are passed in.
"""

from collections.abc import Sequence
from typing import Final

_WEIGHT: Final = 0.1


class StepTimes:
    """Predicts the time of steps with one token for each row.

    A step with more rows, or with rows that see more tokens, takes longer, but less time for each row or token. So
    predictions for steps that are larger than the observed ones are too long.

    Args:
        follows_lengths: whether the time of a row grows with the number of tokens that it sees, as with latents that
            are expanded.
    """

    def __init__(self, *, follows_lengths: bool = False) -> None:
        self._follows_lengths = follows_lengths
        self._row_s = 0.0
        self._seen_token_s = 0.0

    def observe(self, seconds: float, num_seen: Sequence[int]) -> None:
        """Notes the seconds of a step. `num_seen` is the number of tokens that each row saw, including its own."""
        self._row_s = moved(self._row_s, seconds / len(num_seen))
        self._seen_token_s = moved(self._seen_token_s, seconds / sum(num_seen))

    def predict(self, num_seen: Sequence[int]) -> float | None:
        """Predicts the seconds of a step whose rows see `num_seen` tokens each; None before the first observation."""
        if not self._row_s:
            return None
        by_rows = len(num_seen) * self._row_s
        return max(by_rows, sum(num_seen) * self._seen_token_s) if self._follows_lengths else by_rows


def moved(average: float, value: float) -> float:
    """The average, moved by a tenth towards the new value. An average of 0 becomes the value."""
    return average + (_WEIGHT if average else 1.0) * (value - average)
