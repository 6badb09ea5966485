"""From logits to the tokens of one answer."""

import time
from collections.abc import Sequence

import torch

from corolla.client.generation.answer import Answer
from corolla.client.generation.sampling import Sampler


class AnswerReader:
    """Chooses an answer's tokens. The loop owns it, and leaves it alone while a step is under way.

    Args:
        started_s: when the request began, by `time.monotonic()`.

    Attributes:
        guesses: that the step under way carries.
    """

    def __init__(self, sampler: Sampler, answer: Answer, started_s: float) -> None:
        self.guesses: Sequence[int] = ()
        self._sampler = sampler
        self._answer = answer
        self._started_s = started_s

    def read(self, logits: torch.Tensor) -> list[int]:
        """Tokens from `[1 + len(guesses), V]` logits, up to the first that was not guessed or ends the answer.

        So the random stream gives just the numbers that it gives without guesses.
        """
        token_ids: list[int] = []
        for index, row in enumerate(logits):
            token = self._sampler.sample(row)
            token_ids.append(token.token_id)
            self._answer.accept(token, time.monotonic() - self._started_s)
            is_right = index < len(self.guesses) and token.token_id == self.guesses[index]
            if not (self.goes_on and is_right):
                break
        return token_ids

    @property
    def goes_on(self) -> bool:
        return self._answer.finish_reason is None
