"""When the tokens of one answer came, on the clock of `time.perf_counter`."""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer.

    Attributes:
        started_s: when it was asked for.
        stamps_s: when each token came.
        token_ids: the tokens, where they were kept.
        num_recoveries: how many times lost or leaving hops were replaced.
    """

    started_s: float
    stamps_s: tuple[float, ...]
    token_ids: tuple[int, ...] = ()
    num_recoveries: int = 0

    @property
    def first_token_s(self) -> float:
        return self.stamps_s[0] - self.started_s

    @property
    def total_s(self) -> float:
        return self.stamps_s[-1] - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next."""
        return [later - sooner for sooner, later in itertools.pairwise(self.stamps_s)]

    def longest_gap_s(self, since_s: float, until_s: float = math.inf) -> float:
        """The longest time between two tokens of which the second came after `since_s`, the first before `until_s`."""
        pairs = itertools.pairwise(self.stamps_s)
        return max((later - sooner for sooner, later in pairs if later >= since_s and sooner <= until_s), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.stamps_s) - 1) / (self.stamps_s[-1] - self.stamps_s[0])
