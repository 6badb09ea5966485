"""What the rows of a microbatch cost, learnt from how long microbatches take to come round. Pure."""

import math
from typing import Final

_MEMORY: Final = 0.98
"""What an observation counts after the next one."""
_LEAST_SPREAD: Final = 0.1
"""Of the numbers of rows, as a part of their mean: from less than that no slope can be read."""


class RoundTimes:
    """A line through the latest rounds: so many seconds in any case, and so many for each row.

    Attributes:
        rows_for_free: so many rows take as long as a round without any; infinite until rows are seen to cost time.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._rows_seconds = 0.0
        self.rows_for_free = math.inf

    def observe(self, num_rows: int, seconds: float) -> None:
        """A microbatch came round."""
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + num_rows
        self._seconds = self._seconds * _MEMORY + seconds
        self._rows_squared = self._rows_squared * _MEMORY + num_rows * num_rows
        self._rows_seconds = self._rows_seconds * _MEMORY + num_rows * seconds
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - mean_rows * mean_rows
        if variance < (_LEAST_SPREAD * mean_rows) ** 2:
            return
        seconds_of_row = (self._rows_seconds / self._weight - mean_rows * mean_s) / variance
        if seconds_of_row > 0:
            self.rows_for_free = max(0.0, mean_s / seconds_of_row - mean_rows)
        else:
            self.rows_for_free = math.inf
