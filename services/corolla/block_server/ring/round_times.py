"""How long rounds with few and with many rows take, learnt from those that came round. Pure."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_SHORTER_COUNTS: Final = 0.2
_LONGER_COUNTS: Final = 0.02
"""What the newest round of a size counts. What else a machine does, such as prompts, only makes rounds longer."""


@dataclass(slots=True)
class _Size:
    """Rounds with about the same number of rows: from a power of two up to the next one."""

    num_rows: float
    seconds: float

    def observe(self, num_rows: int, seconds: float) -> None:
        counts = _SHORTER_COUNTS if seconds < self.seconds else _LONGER_COUNTS
        self.num_rows += counts * (num_rows - self.num_rows)
        self.seconds += counts * (seconds - self.seconds)


class RoundTimes:
    """A low expectile (Newey, Powell: "Asymmetric Least Squares", 1987) of the rounds of each size.

    A size keeps what it has however long it is not seen: all rounds of a busy server may be of one size for hours.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """A microbatch came round, while so many rows, at least one, were under way."""
        size = self._sizes.get(num_rows.bit_length())
        if size is None:
            self._sizes[num_rows.bit_length()] = _Size(num_rows, seconds)
        else:
            size.observe(num_rows, seconds)

    def num_rows_within(self, factor: int, num_rows: int) -> float:
        """With how many rows under way a round takes `factor` times as long as with `num_rows`.

        Infinite as long as none was seen to: more rows show it, or cost nothing.
        """
        sizes = [self._sizes[each] for each in sorted(self._sizes)]
        if not sizes:
            return math.inf
        limit_s = factor * _interpolated(sizes, num_rows)
        for smaller, larger in pairwise(sizes):
            if larger.num_rows > num_rows and larger.seconds > limit_s:
                slope = (larger.seconds - smaller.seconds) / (larger.num_rows - smaller.num_rows)
                return larger.num_rows - (larger.seconds - limit_s) / slope if slope > 0 else float(num_rows)
        return math.inf


def _interpolated(sizes: list[_Size], num_rows: int) -> float:
    """Seconds of a round with `num_rows`; outside of the sizes that were seen, those of the nearest one."""
    for smaller, larger in pairwise(sizes):
        if smaller.num_rows <= num_rows <= larger.num_rows:
            part = (num_rows - smaller.num_rows) / (larger.num_rows - smaller.num_rows)
            return smaller.seconds + part * (larger.seconds - smaller.seconds)
    return sizes[0].seconds if num_rows < sizes[0].num_rows else sizes[-1].seconds
