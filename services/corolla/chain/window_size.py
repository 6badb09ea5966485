"""Decides from measured times how many steps of a sequence are under way at a time, so that no hop waits for one.

Pure: times are passed in.
"""

import math
from collections import deque
from typing import Final

_FEWEST_PER_HOP: Final = 2
# More steps under way than this would fill the queues of the slowest hop, and be computed again after a loss.
_MOST_PER_HOP: Final = 16
# Two intervals, so that answers that arrive together once are not taken for the pace of the hops.
_FEWEST_ANSWERS: Final = 3


class WindowSize:
    """The most steps under way.

    At first there are two steps for each hop: one is computed, and another one waits. That is enough while a hop
    computes longer than the links take. Otherwise hops would wait, so the size becomes what the chain holds: the
    shortest time from a step to its answer, divided by the time between two answers (as congestion control of TCP
    finds the product of bandwidth and delay), and one more. If too small a window sets the pace of the answers, that
    one makes the window grow with each round.

    Args:
        num_hops: the number of hops that compute the steps.
    """

    def __init__(self, num_hops: int) -> None:
        self._fewest = _FEWEST_PER_HOP * num_hops
        self._most = _MOST_PER_HOP * num_hops
        self._shortest_s = math.inf
        self._answers_s: deque[float] = deque(maxlen=max(self._fewest, _FEWEST_ANSWERS))

    def answered(self, sent_s: float, answered_s: float) -> None:
        """Notes when a step was sent and when its answer came, in seconds of one clock; answers come in order."""
        self._shortest_s = min(self._shortest_s, answered_s - sent_s)
        self._answers_s.append(answered_s)

    @property
    def max_steps(self) -> int:
        """The most steps under way now."""
        if len(self._answers_s) < _FEWEST_ANSWERS:
            return self._fewest
        interval_s = (self._answers_s[-1] - self._answers_s[0]) / (len(self._answers_s) - 1)
        if interval_s * self._most <= self._shortest_s:
            return self._most
        return min(self._most, max(self._fewest, math.ceil(self._shortest_s / interval_s) + 1))
