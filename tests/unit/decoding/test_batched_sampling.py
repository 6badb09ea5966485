"""Tokens that are chosen together are those that each sampler chooses alone."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler, launch_choice, sample_together
from tests.sampled import sample

VOCABULARY_SIZE = 97
PROMPT = (3, 1, 4, 1, 5, 96)

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
    logit_bias=st.sampled_from([(), ((3, 7.5), (96, -100.0))]),
)


def logits_of(num_rows: int, seed: int, *, has_ties: bool) -> torch.Tensor:
    logits = 3 * torch.randn(num_rows, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed))
    return logits.round() if has_ties else logits


@given(
    many=st.lists(PARAMS, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    has_ties=st.booleans(),
    position=st.integers(0, 300),
)
def test_rows_get_the_tokens_that_their_samplers_choose_alone(
    many: list[SamplingParams], seed: int, has_ties: bool, position: int
) -> None:
    def samplers() -> list[Sampler]:
        return [
            Sampler(replace(params, seed=seed + index), PROMPT, generated_ids=(7, 7), position=position)
            for index, params in enumerate(many)
        ]

    alone, together = samplers(), samplers()
    for number in range(4):
        logits = logits_of(len(many), seed + number, has_ties=has_ties)
        untouched = logits.clone()
        expected = [sample(sampler, row) for sampler, row in zip(alone, logits, strict=True)]
        found = sample_together(together, logits)
        assert _without_logprobs(found) == _without_logprobs(expected)
        assert torch.equal(logits, untouched)
    assert {sampler.position for sampler in (*alone, *together)} == {position + 4}


@pytest.mark.parametrize("params", [SamplingParams(1.3, top_p=0.9, seed=2), SamplingParams(0.0, num_logprobs=2)])
def test_tokens_of_several_positions_are_chosen_at_once(params: SamplingParams) -> None:
    """Draft tokens are checked so, where a choice does not look back."""
    logits, sampler, ahead = logits_of(6, 3, has_ties=False), Sampler(params, PROMPT), Sampler(params, PROMPT)
    expected = [sample(sampler, row) for row in logits]
    assert launch_choice([ahead] * 6, logits, range(6)).finish() == expected
    assert ahead.position == 0


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
            expected = [sample(alone[index], row) for index, row in zip(indices, logits, strict=True)]
            assert sample_together([together[index] for index in indices], logits) == expected


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, top_p=0.9, top_k=5, seed=1)])
def test_a_row_that_is_not_finite_fails_alone(params: SamplingParams, number: float) -> None:
    logits = logits_of(3, 1, has_ties=False)
    expected = [sample(Sampler(params, PROMPT), row) for row in logits]
    if number < 0:
        logits[1] = number
    else:
        logits[1, 8] = number
    first, spoilt, last = sample_together([Sampler(params, PROMPT) for _ in logits], logits)
    assert [first, last] == [expected[0], expected[2]]
    assert isinstance(spoilt, NonFiniteOutput)


def _without_logprobs(tokens: Sequence[SampledToken | CorollaError]) -> list[int]:
    # A CPU forms the sums of log probabilities in another order for another number of rows, in the last bit.
    return [token.token_id for token in tokens if isinstance(token, SampledToken)]


def test_a_row_that_fails_counts_no_token() -> None:
    params = SamplingParams(1.0, seed=1, repetition_penalty=5.0, presence_penalty=2.0, frequency_penalty=2.0)
    plain, spoilt = Sampler(params, PROMPT), Sampler(params, PROMPT)
    row = logits_of(1, 1, has_ties=False)[0]
    bad = row.clone()
    bad[60] = torch.nan
    other = Sampler(params, PROMPT)
    (failure, _) = sample_together([spoilt, other], torch.stack((bad, row)))
    assert isinstance(failure, NonFiniteOutput)
    for _ in range(3):
        assert sample_together([spoilt, other], row.expand(2, -1))[0] == sample(plain, row)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators while it is entered, and those that wait for a device."""

    # `tolist` calls `resolve_conj` first, and then no operator on a CPU.
    WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "resolve_conj")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = self.num_waiting = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        self.num_waiting += func.overloadpacket.__name__ in self.WAITING
        # A mask as index makes a tensor whose size only the device knows.
        if func.overloadpacket is torch.ops.aten.index:
            self.num_waiting += any(each is not None and each.dtype == torch.bool for each in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "kinds",
    [
        [SamplingParams(0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.1, seed=1)],
        [SamplingParams(0.8, top_k=7, min_p=0.1, seed=1), SamplingParams(frequency_penalty=0.3, num_logprobs=4)],
        [SamplingParams(0.8, top_p=0.9, num_logprobs=0), SamplingParams(0.8, logit_bias=((3, 7.5),), seed=2)],
    ],
)
def test_a_step_of_many_rows_takes_the_operators_of_one_of_few_rows_and_waits_once(kinds: list[SamplingParams]) -> None:
    """A GPU spends more time on launches, and on waits for them, than on the numbers of 64 rows."""

    def operators(num_rows: int) -> _Operators:
        samplers = [Sampler(params, PROMPT) for params in kinds * (num_rows // len(kinds))]
        logits = logits_of(num_rows, 1, has_ties=False)
        # The first choice makes what later ones keep.
        sample_together(samplers, logits)
        counted = _Operators()
        with counted:
            tokens = sample_together(samplers, logits)
        assert all(isinstance(token, SampledToken) for token in tokens)
        return counted

    few, many = operators(2), operators(64)
    assert many.num_calls == few.num_calls < 80
    assert many.num_waiting == few.num_waiting == 1
