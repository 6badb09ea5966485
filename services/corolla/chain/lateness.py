"""When a session's token is late, and when silence tells of a server rather than of this machine. Pure."""

import math
from collections import deque
from typing import Final

_NUM_WAITS: Final = 64
_FEWEST_WAITS: Final = 8
_LEAST_LATE_S: Final = 0.05
ANSWER_S: Final = 0.1
"""How long a server may take to answer a ping while a token is late, unless its link is slower."""


class TokenWaits:
    """How long a session has waited for its newest tokens.

    The largest of the newest waits stands for their 99th percentile. A long wait that a hop explained by its answers
    counts, too, so a machine that becomes slow soon has no late tokens.
    """

    def __init__(self) -> None:
        self._waits_s: deque[float] = deque(maxlen=_NUM_WAITS)

    def add(self, wait_s: float) -> None:
        self._waits_s.append(wait_s)

    @property
    def late_after_s(self) -> float:
        """A token is late after so many seconds; infinite while too few tokens have come."""
        if len(self._waits_s) < _FEWEST_WAITS:
            return math.inf
        return max(_LEAST_LATE_S, 3 * max(self._waits_s))


def overslept(asked_s: float, answer_s: float, now_s: float) -> bool:
    """This process was held up while it waited for an answer, so the silence proves nothing."""
    return now_s - asked_s > 1.5 * answer_s


def may_blame(num_silent: int, num_servers: int) -> bool:
    """Whether silence is the servers' own: if more than a quarter of them are silent at once, this machine is slow.

    The rule counts servers and not sessions, since one frozen server delays half of the sessions if a span has two.
    """
    return num_silent <= max(1, num_servers // 4)
