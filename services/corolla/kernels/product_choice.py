"""Chooses the product for weights of one shape, so that no row of a result depends on the other rows. Pure.

On a GPU a library may split a product's inner dimension at some numbers of rows, and not at others, so that a row's
bits depend on how many other rows a call has. A server therefore pads its calls to a ladder of sizes, and measures at
start whether a product gives each row the same bits on all of them. It has to compare all rows of a large input: where
the inner dimension is short, two orders of summing differ in so few numbers that one row may miss it.
"""

from bisect import bisect_left
from typing import Final

BETWEEN: Final = frozenset({192, 384, 640, 768, 1280, 1536})
"""Numbers of rows of calls that spare padding; a product that breaks the rule there is used without them."""
LADDER: Final = tuple(sorted({*(1 << power for power in range(12)), *BETWEEN}))
"""The numbers of rows of calls. A product keeps the rule at all powers of two, from 1 to 2,048."""

# A trial's output has at most this many numbers: 256 MiB in half precision.
_MOST_NUMBERS: Final = 1 << 27


def rungs(num_outputs: int) -> tuple[int, ...]:
    """The part of the ladder that is used for weights with so many outputs; it begins with 1."""
    return tuple(rung for rung in LADDER if rung == 1 or rung * num_outputs <= _MOST_NUMBERS)


def rung_of(num_rows: int, ladder: tuple[int, ...]) -> int:
    """Returns how many rows a call of at most `ladder[-1]` rows has after padding."""
    return ladder[bisect_left(ladder, num_rows)]
