"""A difference that rounding does not explain is one, whichever way a token was chosen."""

import pytest
import torch

from tests.reference import Sampling
from tests.vllm_engine.questions import TIE, Answer, Question, first_difference

pytestmark = pytest.mark.vllm

SAMPLINGS: tuple[Sampling, ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4},
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=len)
def test_the_gap_is_what_a_token_lacks(sampling: Sampling) -> None:
    logits = 3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    question = Question([1, 2], len(logits), sampling)
    sampler = question.sampler()
    answer = Answer([sampler.sample(row).token_id for row in logits], logits)
    assert first_difference(question, answer, answer.token_ids) is None
    other = (answer.token_ids[5] + 1) % 16
    found = first_difference(question, answer, [*answer.token_ids[:5], other, 0, 0])
    assert found is not None
    assert (found.index, found.expected, found.found, found.is_tie) == (5, answer.token_ids[5], other, False)
    if not sampling:
        assert found.gap == pytest.approx(float(logits[5].max() - logits[5, other]), abs=1e-5)
    # A little below that height the other token is a tie, and above it the one that is chosen.
    logits[5, other] += found.gap - TIE / 2
    assert answer.chosen_by(question, logits) == answer.token_ids
    nearly = first_difference(question, answer, [*answer.token_ids[:5], other])
    assert nearly is not None
    assert nearly.is_tie
    logits[5, other] += TIE
    assert answer.chosen_by(question, logits) == [*answer.token_ids[:5], other]


@pytest.mark.parametrize("num_tokens", [0, 2, 4])
def test_answers_of_other_lengths_differ(num_tokens: int) -> None:
    logits = torch.eye(3)
    question, answer = Question([1], 3), Answer([0, 1, 2], logits)
    found = first_difference(question, answer, [0, 1, 2, 0][:num_tokens])
    assert found is not None
    assert not found.is_tie
