"""How many of the waiting rows leave as the next microbatch of a route. Pure.

A chain of `h` hops is kept busy by `h` microbatches that follow each other. So each is an `h`-th of the sessions that
go round: they spread so even if they began one by one, since what comes back waits behind what is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile


@dataclass(frozen=True, slots=True)
class MicrobatchRules:
    """Bounds the microbatches of one route: `max_under_way` at a time, one for each hop, and `max_tokens` of each.

    A single row may have as many tokens as a microbatch.
    """

    max_under_way: int
    max_tokens: int

    def num_leaving(self, waiting: Sequence[int], num_under_way: int, num_rows_under_way: int) -> int:
        """How many of the waiting rows leave now, the first ones; 0 while they should wait.

        Args:
            waiting: tokens of each waiting row, in the order in which they came.
            num_under_way: microbatches that have not come back.
            num_rows_under_way: rows of these.
        """
        if not waiting or num_under_way >= self.max_under_way:
            return 0
        share = -(-(len(waiting) + num_rows_under_way) // self.max_under_way)
        totals = takewhile(lambda total: total <= self.max_tokens, accumulate(waiting[:share]))
        return max(1, sum(1 for _ in totals))
