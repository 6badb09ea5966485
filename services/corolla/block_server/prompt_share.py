"""Decides from measured times how many prompt tokens an iteration takes while other sessions decode.

Each token of a decoding session waits for the prompts of its iteration. A GPU computes hundreds of prompt tokens in
hardly more time than one, since launching kernels and reading the weights take longest; how many, depends on the GPU
and on the model. Pure: times are passed in.
"""

from typing import Final

_MIN_TOKENS: Final = 16
# Times scatter, so the number moves half of the way.
_STEP: Final = 0.5


class PromptShare:
    """Moves the number of prompt tokens until iterations take as long as they may.

    If an iteration of p prompt tokens takes t = a + b p seconds and may take L, one of p L / t tokens takes
    L - a (L / t - 1): less than L if t is. So short iterations let the number grow, and never beyond its goal; long
    ones let it shrink. Neither needs to know a and b. Decode steps alone say nothing about a and b: they are recorded,
    and launched before the step ahead of them has ended.

    Example: a step takes 20 ms and 25 us for each prompt token, and may take 50 ms. Iterations of 512 tokens take
    32.8 ms, so the number moves from 512 half of the way to 780, and on to 1,200.

    Args:
        longest_s: how long an iteration with prompts and decode steps should take at most, in seconds.
        max_tokens: the most tokens of one iteration.
        first_tokens: the number before an iteration was observed.

    Attributes:
        num_tokens: the most prompt tokens of an iteration with decode steps.
    """

    def __init__(self, longest_s: float, max_tokens: int, first_tokens: int) -> None:
        self._longest_s = longest_s
        self._max_tokens = max_tokens
        self._wanted = float(first_tokens)

    @property
    def num_tokens(self) -> int:
        return round(self._wanted)

    def observe(self, num_prompt_tokens: int, seconds: float) -> None:
        """Notes how long an iteration took that had so many prompt tokens."""
        if not num_prompt_tokens:
            return
        allowed = num_prompt_tokens * self._longest_s / seconds
        # A few prompt tokens in little time do not say that more of them would take too long, and the reverse.
        if (seconds > self._longest_s) == (allowed < self._wanted):
            wanted = self._wanted + _STEP * (allowed - self._wanted)
            self._wanted = min(float(self._max_tokens), max(float(_MIN_TOKENS), wanted))
