"""How long a decode step is going to take, by those that were observed. Pure: times are passed in."""

from collections.abc import Sequence
from typing import Final

_WEIGHT: Final = 0.1


class StepTimes:
    """Predicts steps of one token for each row.

    More rows take longer, but less each; and so do more tokens that a row sees. So predictions err on the long side for
    steps that are larger than those that were observed.

    Args:
        follows_lengths: whether a row's time is that of the tokens which it sees, as where latents are expanded.
    """

    def __init__(self, *, follows_lengths: bool = False) -> None:
        self._follows_lengths = follows_lengths
        self._row_s = 0.0
        self._seen_token_s = 0.0

    def observe(self, seconds: float, num_seen: Sequence[int]) -> None:
        """A step took so long. `num_seen`: how many tokens each of its rows saw, its own one among them."""
        self._row_s = _moved(self._row_s, seconds / len(num_seen))
        self._seen_token_s = _moved(self._seen_token_s, seconds / sum(num_seen))

    def predict(self, num_seen: Sequence[int]) -> float | None:
        """Seconds of a step whose rows see so many tokens; None before the first observation."""
        if not self._row_s:
            return None
        by_rows = len(num_seen) * self._row_s
        return max(by_rows, sum(num_seen) * self._seen_token_s) if self._follows_lengths else by_rows


def _moved(average: float, value: float) -> float:
    """An average that follows the newest values."""
    return average + (_WEIGHT if average else 1.0) * (value - average)
