"""Penalties on tokens that were seen before, kept up to date token by token.

Each new token costs the same, however long the text is: what was seen is a vector over the vocabulary, not a list.
"""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class TokenPenalties:
    """Repetition, presence and frequency penalty of one sequence.

    The repetition penalty is that of `transformers`, over prompt and answer: a seen token's logit is divided by it
    when positive and multiplied when negative, once per token, bit for bit as `RepetitionPenaltyLogitsProcessor` does.
    Presence and frequency penalty are those of the OpenAI API, over the answer alone: the logit of a token that occurs
    `c` times in it is lowered by `presence * (c > 0) + frequency * c`. The repetition penalty comes first.

    Args:
        prompt_ids: the tokens before the answer.
        generated_ids: tokens of the answer that exist already.
        repetition: 1 switches it off.
        presence: 0 switches it off.
        frequency: 0 switches it off.
        vocabulary_size: length of the logits. Ids beyond it (an embedding may be larger than the head) are ignored.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        *,
        repetition: float,
        presence: float,
        frequency: float,
        vocabulary_size: int,
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._vocabulary_size = vocabulary_size
        self._is_seen: Tensor | None = None
        self._counts: Tensor | None = None
        if repetition != 1.0:
            self._is_seen = torch.zeros(vocabulary_size, dtype=torch.bool)
            self._is_seen[self._known([*prompt_ids, *generated_ids])] = True
        if presence != 0.0 or frequency != 0.0:
            self._counts = torch.bincount(self._known(generated_ids), minlength=vocabulary_size).to(torch.float32)

    def _known(self, token_ids: Iterable[int]) -> Tensor:
        return torch.tensor([i for i in token_ids if i < self._vocabulary_size], dtype=torch.int64)

    def copy(self) -> "TokenPenalties":
        """The same as they stand; neither notices what is added to the other."""
        copied = copy.copy(self)
        copied._is_seen = None if self._is_seen is None else self._is_seen.clone()
        copied._counts = None if self._counts is None else self._counts.clone()
        return copied

    def apply(self, logits: Tensor) -> Tensor:
        """The penalised scores, float32 [vocabulary]; `logits` stays as it is."""
        scores = logits
        if self._is_seen is not None:
            penalised = torch.where(scores < 0, scores * self._repetition, scores / self._repetition)
            scores = torch.where(self._is_seen, penalised, scores)
        if self._counts is not None:
            scores = scores - (self._counts * self._frequency + (self._counts > 0) * self._presence)
        return scores

    def add(self, token_id: int) -> None:
        """Takes note of the answer's next token."""
        if self._is_seen is not None:
            self._is_seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1
