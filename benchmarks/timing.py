"""When the tokens of one answer came, on the clock of `time.perf_counter`."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer.

    Attributes:
        started_s: when it was asked for.
        stamps_s: when each token came.
    """

    started_s: float
    stamps_s: tuple[float, ...]

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

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.stamps_s) - 1) / (self.stamps_s[-1] - self.stamps_s[0])
