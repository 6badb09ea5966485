"""Learns how long a microbatch takes to come round the ring when few or many rows are under way. Pure."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_SHORTER_WEIGHT: Final = 0.2
_LONGER_WEIGHT: Final = 0.02
"""The weight of the newest round in the average of its size, if it was shorter or longer than this average. A longer
round has less weight, since other work of the machine, such as prompts, only makes rounds longer."""


@dataclass(slots=True)
class _Size:
    """The averages of the rounds whose numbers of rows lie between the same two powers of two."""

    num_rows: float
    seconds: float

    def observe(self, num_rows: int, seconds: float) -> None:
        counts = _SHORTER_WEIGHT if seconds < self.seconds else _LONGER_WEIGHT
        self.num_rows += counts * (num_rows - self.num_rows)
        self.seconds += counts * (seconds - self.seconds)


class RoundTimes:
    """Keeps an average of the seconds of rounds, for each size of rounds (number of rows under way).

    Short rounds weigh more in it: it is a low expectile (Newey, Powell: "Asymmetric Least Squares", 1987). A size keeps
    its average even if it does not occur for hours, since all rounds of a busy server may have one other size.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Notes that a microbatch came round in `seconds`, with `num_rows` rows under way, at least one."""
        size = self._sizes.get(num_rows.bit_length())
        if size is None:
            self._sizes[num_rows.bit_length()] = _Size(num_rows, seconds)
        else:
            size.observe(num_rows, seconds)

    def num_rows_within(self, factor: int, num_rows: int) -> float:
        """Returns the number of rows under way with which a round takes `factor` times as long as with `num_rows`.

        The result is infinite as long as no round took that long: either larger rounds will show the number later, or
        more rows cost no time.
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
    """The seconds of a round with `num_rows` rows; the nearest size that was seen stands for sizes beyond it."""
    for smaller, larger in pairwise(sizes):
        if smaller.num_rows <= num_rows <= larger.num_rows:
            part = (num_rows - smaller.num_rows) / (larger.num_rows - smaller.num_rows)
            return smaller.seconds + part * (larger.seconds - smaller.seconds)
    return sizes[0].seconds if num_rows < sizes[0].num_rows else sizes[-1].seconds
