"""Decides from measured times how many prompt tokens an iteration takes while other sessions decode.

Each token of a decoding session waits for the prompts of its iteration. A GPU computes hundreds of prompt tokens in
hardly more time than one, since reading the weights takes longest; how many, depends on the GPU and on the model. Pure:
times are passed in.
"""

from typing import Final

# Older iterations count less and less, so that the line follows a load whose texts become longer.
_MEMORY: Final = 0.98
_MIN_TOKENS: Final = 16


class PromptShare:
    """Fits a line to the times of iterations by least squares, in which newer iterations count more.

    Args:
        longest_s: how long an iteration with prompts and decode steps should take at most, in seconds.
        max_tokens: the most tokens of one iteration.
        first_tokens: the answer before two iterations of different sizes were observed.
    """

    def __init__(self, longest_s: float, max_tokens: int, first_tokens: int) -> None:
        self._longest_s = longest_s
        self._max_tokens = max_tokens
        self._first_tokens = first_tokens
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Notes how long an iteration of `num_tokens` tokens took, prompt tokens and decoded ones together."""
        self._weight = self._weight * _MEMORY + 1
        self._tokens = self._tokens * _MEMORY + num_tokens
        self._seconds = self._seconds * _MEMORY + seconds
        self._squares = self._squares * _MEMORY + num_tokens * num_tokens
        self._products = self._products * _MEMORY + num_tokens * seconds

    @property
    def num_tokens(self) -> int:
        """The most prompt tokens of an iteration with decode steps."""
        spread = self._weight * self._squares - self._tokens**2
        if spread <= 1e-6 * self._tokens**2:
            return self._first_tokens
        token_s = (self._weight * self._products - self._tokens * self._seconds) / spread
        if token_s <= 0:
            return self._max_tokens
        alone_s = (self._seconds - token_s * self._tokens) / self._weight
        return min(self._max_tokens, max(_MIN_TOKENS, int((self._longest_s - alone_s) / token_s)))
