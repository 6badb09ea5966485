"""Penalties for tokens that a text has already: repetition, presence and frequency."""

import copy
import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from corolla.wire.device_copies import on_device, to_device


class TokenPenalties:
    """The repetition, presence and frequency penalty of one sequence.

    The repetition penalty is that of `transformers`, over prompt and answer: a seen token's logit is divided by it
    when positive and multiplied when negative, once per token, bit for bit as `RepetitionPenaltyLogitsProcessor` does.
    Presence and frequency penalty work as in the OpenAI API, over the answer alone: the logit of a token that occurs
    `c` times there is lowered by `presence * (c > 0) + frequency * c`. The repetition penalty comes first.

    Args:
        generated_ids: the tokens of the answer so far.
        repetition: 1 switches it off; 0 switches `presence` and `frequency` off.
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
        self._stack: StackedPenalties | None = None
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
        """A copy in the same state. Tokens that are added to one do not change the other."""
        copied = copy.copy(self)
        copied._stack = None
        copied._is_seen = None if self._is_seen is None else self._is_seen.clone()
        copied._counts = None if self._counts is None else self._counts.clone()
        return copied


class StackedPenalties:
    """The penalties of several sequences, one for each row of logits. The number of operators is that of one sequence.

    The sequences' own numbers are rows of the stack's, so a batch with the rows of the last one copies nothing. The
    sequences that a new stack leaves behind get one of their own, since each would keep the memory of the old one.

    Args:
        penalties: those of each row; no one occurs twice.
        device: where the logits are; the penalties move there.
    """

    def __init__(self, penalties: Sequence[TokenPenalties], device: torch.device) -> None:
        self._device = device
        self._members = list(map(weakref.ref, penalties))
        old = {id(each._stack): each._stack for each in penalties if each._stack is not None}
        self._are_seen = self._stacked([each._is_seen for each in penalties], torch.bool)
        self._counts = self._stacked([each._counts for each in penalties], torch.float32)
        settings = [(each._repetition, each._frequency, each._presence) for each in penalties]
        self._settings = on_device(tuple(itertools.chain(*settings)), device, torch.float32).view(-1, 3)
        for index, each in enumerate(penalties):
            each._stack = self
            if each._is_seen is not None and self._are_seen is not None:
                each._is_seen = self._are_seen[index]
            if each._counts is not None and self._counts is not None:
                each._counts = self._counts[index]
        for stack in old.values():
            stack._leave()

    @classmethod
    def stacked(cls, penalties: Sequence[TokenPenalties], device: torch.device) -> "StackedPenalties":
        """The stack that these penalties make already, in this order and on this device, or a new one."""
        stack = penalties[0]._stack
        return stack if stack is not None and stack._is_of(penalties, device) else cls(penalties, device)

    def _is_of(self, penalties: Sequence[TokenPenalties], device: torch.device) -> bool:
        if len(penalties) != len(self._members) or device != self._device:
            return False
        return all(
            each._stack is self and member() is each for each, member in zip(penalties, self._members, strict=True)
        )

    def _leave(self) -> None:
        """Gives the sequences that are in no newer stack a stack without the others."""
        members = [member() for member in self._members]
        if left := [each for each in members if each is not None and each._stack is self]:
            StackedPenalties(left, self._device)

    def _stacked(self, own: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
        kept = [to_device(each, self._device, dtype) for each in own if each is not None]
        if not kept:
            return None
        nothing, rows = torch.zeros_like(kept[0]), iter(kept)
        return torch.stack([nothing if each is None else next(rows) for each in own])

    def apply(self, logits: Tensor) -> Tensor:
        """The penalised scores, float32 `[R, V]`, of `logits`, float32 `[R, V]`, which are not changed.

        No row depends on the others.
        """
        scores = logits
        factors, frequencies, presences = self._settings[:, 0:1], self._settings[:, 1:2], self._settings[:, 2:3]
        if self._are_seen is not None:
            penalised = torch.where(scores < 0, scores * factors, scores / factors)
            scores = torch.where(self._are_seen, penalised, scores)
        if self._counts is not None:
            scores = scores - (self._counts * frequencies + (self._counts > 0) * presences)
        return scores

    def add(self, token_ids: Tensor, are_added: Tensor) -> None:
        """Counts the next token of each answer in constant time, and waits for no device.

        Args:
            token_ids: int64 `[R]`, on the device of the penalties.
            are_added: bool `[R]` likewise: whether the row's token is counted.
        """
        at, are_added = token_ids.unsqueeze(1), are_added.unsqueeze(1)
        if self._are_seen is not None:
            self._are_seen.scatter_(1, at, self._are_seen.gather(1, at) | are_added)
        if self._counts is not None:
            self._counts.scatter_add_(1, at, are_added.to(self._counts.dtype))
