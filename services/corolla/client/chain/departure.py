"""When waiting decode steps leave as a gang, and how many of them. Pure.

A chain of `h` hops is kept busy by `h` gangs that follow each other. So each is an `h`-th of the sessions that decode,
and leaves as soon as it is complete; a smaller one leaves only when nothing is under way that it could wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile


@dataclass(frozen=True, slots=True)
class GangRules:
    """What bounds the gangs of one chain.

    Attributes:
        max_under_way: gangs at a time; the number of hops.
        max_tokens: of one gang, since hops refuse longer steps. A single step may have as many.
    """

    max_under_way: int
    max_tokens: int

    def share(self, num_sessions: int) -> int:
        """How many steps make a gang complete, where so many sessions decode."""
        return -(-max(num_sessions, 1) // self.max_under_way)

    def num_leaving(self, waiting: Sequence[int], num_sessions: int, num_under_way: int, *, may_come: bool) -> int:
        """How many of those who wait leave now, the first ones; 0 while they should wait.

        Args:
            waiting: tokens of each waiting step, in the order in which they came.
            num_sessions: that decode on this chain, waiting or not.
            num_under_way: gangs that have not come back.
            may_come: whether more steps are expected at any moment, so that a gang that is not complete yet waits for
                them even if nothing is under way.
        """
        if not waiting or num_under_way >= self.max_under_way:
            return 0
        share = self.share(num_sessions)
        totals = takewhile(lambda total: total <= self.max_tokens, accumulate(waiting[:share]))
        num_fitting = max(1, sum(1 for _ in totals))
        is_complete = len(waiting) >= share
        return num_fitting if is_complete or not (num_under_way or may_come) else 0
