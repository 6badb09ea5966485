"""What a whole model is asked, what it answers, and whether another one's tokens are the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampling import Sampler
from tests.reference import Sampling

TIE: Final = 1e-4
"""Logits: what the same sums in another order may turn round. The worst of 49,152 logits differ by twice as much."""
_FAR: Final = 1e4
_HALVINGS: Final = 40


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how to choose `num_tokens` tokens after it, end tokens or not."""

    prompt_ids: Sequence[int]
    num_tokens: int
    sampling: Sampling = field(default_factory=Sampling)

    def sampler(self, generated_ids: Sequence[int] = ()) -> Sampler:
        """Corolla's, as it stands after some tokens of the answer."""
        params = SamplingParams(**self.sampling)
        return Sampler(params, self.prompt_ids, generated_ids=generated_ids, num_skipped=len(generated_ids))


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, and the logits that each was chosen by: float32 `[tokens, vocabulary]`."""

    token_ids: list[int]
    logits: Tensor

    def chosen_by(self, question: Question, logits: Iterable[Tensor]) -> list[int]:
        """What Corolla's sampler takes from other logits after the same tokens, up to the first that is another one."""
        sampler, chosen = question.sampler(), []
        for token_id, row in zip(self.token_ids, logits, strict=True):
            chosen.append(sampler.sample(row).token_id)
            if chosen[-1] != token_id:
                break
        return chosen


@dataclass(frozen=True, slots=True)
class Difference:
    """Where tokens part.

    Attributes:
        index: of the first token that differs.
        expected, found: the tokens; None where there is none.
        gap: by how much the logit of `found` would have to rise for the sampler to choose it. For greedy choice this is
            the distance of the two logits.
    """

    index: int
    expected: int | None
    found: int | None
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= TIE

    def __str__(self) -> str:
        return f"token {self.index} is {self.found}, not {self.expected}: its logit lacks {self.gap:.7f}"


def first_difference(question: Question, answer: Answer, token_ids: Sequence[int]) -> Difference | None:
    """Where tokens part from an answer's, if anywhere; nothing is said of what follows.

    Args:
        token_ids: of as many tokens, or up to one that differs.
    """
    for index, (expected, found) in enumerate(zip(answer.token_ids, token_ids, strict=False)):
        if expected != found:
            return Difference(index, expected, found, _gap(question, answer, index, found))
    if len(token_ids) == len(answer.token_ids):
        return None
    index = min(len(token_ids), len(answer.token_ids))
    ends = [each[index] if index < len(each) else None for each in (answer.token_ids, token_ids)]
    return Difference(index, ends[0], ends[1], torch.inf)


def _gap(question: Question, answer: Answer, index: int, token_id: int) -> float:
    """Whoever draws, penalises or filters: a token whose logit rises is chosen from some height on."""
    sampler = question.sampler(answer.token_ids[:index])

    def wins(rise: float) -> bool:
        logits = answer.logits[index].clone()
        logits[token_id] += rise
        return sampler.fork().sample(logits).token_id == token_id

    too_low, enough = 0.0, _FAR
    for _ in range(_HALVINGS):
        middle = (too_low + enough) / 2
        too_low, enough = (too_low, middle) if wins(middle) else (middle, enough)
    return enough
