"""Tokens that are chosen together are those that each sampler chooses alone, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.chassis.errors import NonFiniteOutput
from corolla.decoding.batched_sampling import sample_together
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler

VOCABULARY_SIZE = 97
PROMPT = (3, 1, 4, 1, 5, 96)
CPU = torch.device("cpu")

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 96, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.6, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    num_logprobs=st.sampled_from([None, 0, 4]),
)


def logits_of(num_rows: int, seed: int, *, has_ties: bool) -> torch.Tensor:
    logits = 3 * torch.randn(num_rows, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed))
    return logits.round() if has_ties else logits


@given(
    many=st.lists(PARAMS, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    has_ties=st.booleans(),
    draws_ahead=st.lists(st.booleans(), min_size=4, max_size=4),
    num_skipped=st.integers(0, 3),
)
def test_rows_get_the_tokens_that_their_samplers_choose_alone(
    many: list[SamplingParams], seed: int, has_ties: bool, draws_ahead: list[bool], num_skipped: int
) -> None:
    def samplers() -> list[Sampler]:
        return [
            Sampler(replace(params, seed=seed + index), PROMPT, generated_ids=(7, 7), num_skipped=num_skipped)
            for index, params in enumerate(many)
        ]

    alone, together = samplers(), samplers()
    for number, draws in enumerate(draws_ahead):
        logits = logits_of(len(many), seed + number, has_ties=has_ties)
        untouched = logits.clone()
        if draws:
            # Twice is once: what is drawn ahead is kept until a choice takes it.
            for sampler in (*together, *together):
                sampler.draw_ahead(VOCABULARY_SIZE, CPU)
        expected = [sampler.sample(row) for sampler, row in zip(alone, logits, strict=True)]
        assert sample_together(together, logits) == expected
        assert torch.equal(logits, untouched)
    assert [sampler.state() for sampler in together] == [sampler.state() for sampler in alone]


def test_which_rows_are_together_decides_nothing() -> None:
    """A batch has other rows in each step."""
    many = [
        SamplingParams(0.8, top_k=9, seed=1),
        SamplingParams(1.3, top_p=0.8, seed=2),
        SamplingParams(frequency_penalty=0.5, num_logprobs=2),
        SamplingParams(1.0, min_p=0.1, repetition_penalty=1.2, seed=3),
    ]
    alone = [Sampler(params, PROMPT) for params in many]
    together = [Sampler(params, PROMPT) for params in many]
    for number, size in enumerate((1, 2, 3, 4, 3, 2, 1)):
        for indices in itertools.combinations(range(len(many)), size):
            logits = logits_of(size, 100 * number + sum(indices), has_ties=False)
            expected = [alone[index].sample(row) for index, row in zip(indices, logits, strict=True)]
            assert sample_together([together[index] for index in indices], logits) == expected


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, top_p=0.9, top_k=5, seed=1)])
def test_a_row_that_is_not_finite_fails_alone(params: SamplingParams, number: float) -> None:
    logits = logits_of(3, 1, has_ties=False)
    expected = [Sampler(params, PROMPT).sample(row) for row in logits]
    if number < 0:
        logits[1] = number
    else:
        logits[1, 8] = number
    first, spoilt, last = sample_together([Sampler(params, PROMPT) for _ in logits], logits)
    assert [first, last] == [expected[0], expected[2]]
    assert isinstance(spoilt, NonFiniteOutput)


def test_numbers_drawn_ahead_are_those_that_a_fork_and_a_later_choice_use() -> None:
    params = SamplingParams(1.0, seed=4)
    plain, ahead = Sampler(params, PROMPT), Sampler(params, PROMPT)
    ahead.draw_ahead(VOCABULARY_SIZE, CPU)
    fork = ahead.fork()
    rows = logits_of(3, 2, has_ties=False)
    expected = [plain.sample(row) for row in rows]
    assert [fork.sample(row) for row in rows] == expected
    assert [ahead.sample(row) for row in rows] == expected
    assert all(isinstance(token, SampledToken) for token in expected)


def test_the_quotient_of_probability_and_number_is_the_choice_of_torch() -> None:
    for seed in range(50):
        logits = logits_of(1, seed, has_ties=seed % 2 == 0)
        expected = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed))
        assert Sampler(SamplingParams(1.0, seed=seed), ()).sample(logits[0]).token_id == int(expected)
