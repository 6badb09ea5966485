"""Decides how many of the waiting rows leave as the next microbatch of a route. Pure.

`h` microbatches that follow each other keep a chain of `h` hops busy. So each gets an `h`-th of the rows. Rows spread
evenly even if their sessions began one by one, since rows that return wait behind earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile


@dataclass(frozen=True, slots=True)
class MicrobatchRules:
    """Bounds the microbatches of one route: at most `max_under_way` at a time, each of at most `max_tokens` tokens.

    A row of more tokens leaves alone.
    """

    max_under_way: int
    max_tokens: int

    def num_leaving(self, waiting: Sequence[int], num_under_way: int, num_rows_under_way: int) -> int:
        """Returns how many of the first waiting rows leave now; 0 while they should wait.

        Args:
            waiting: tokens of each waiting row, in the order in which they came.
            num_under_way: how many microbatches have not come back.
            num_rows_under_way: how many rows these have.
        """
        if not waiting or num_under_way >= self.max_under_way:
            return 0
        share = -(-(len(waiting) + num_rows_under_way) // self.max_under_way)
        totals = takewhile(lambda total: total <= self.max_tokens, accumulate(waiting[:share]))
        return max(1, sum(1 for _ in totals))
