"""Tokens that are chosen together are those that each sampler chooses alone, bit for bit."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.batched_sampling import sample_together
from corolla.decoding.nucleus import within_shares
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler, exponential_numbers

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
    logit_bias=st.sampled_from([(), ((3, 7.5), (96, -100.0))]),
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


@pytest.mark.parametrize("num_logits", [1, 97, 151_936])
def test_outputs_of_the_generator_become_the_numbers_that_torch_draws(num_logits: int) -> None:
    """A device computes them from the outputs, so a session has one random stream on every kind of server."""
    drawing, ahead, outputs = (Sampler(SamplingParams(1.0, seed=5), (), num_skipped=2) for _ in range(3))
    for _ in range(3):
        expected = drawing.random_numbers(num_logits, CPU)
        ahead.draw_ahead(num_logits, CPU)
        assert torch.equal(ahead.random_numbers(num_logits, CPU), expected)
        assert torch.equal(exponential_numbers(outputs.random_outputs(num_logits, CPU)), expected)
    assert drawing.state() == ahead.state() == outputs.state()


def test_a_draft_model_on_a_cpu_reads_the_numbers_that_were_drawn_for_a_device() -> None:
    plain, ahead = (Sampler(SamplingParams(1.0, seed=5), ()) for _ in range(2))
    # The meta device stands for one that is not a CPU: it keeps dtypes and shapes, and no numbers.
    ahead.draw_ahead(9, torch.device("meta"))
    outputs = ahead.random_outputs(9, torch.device("meta"))
    assert (outputs.dtype, outputs.shape, outputs.device.type) == (torch.int64, (9,), "meta")
    plain.random_numbers(9, CPU)
    assert ahead.state() == plain.state()
    assert torch.equal(ahead.random_numbers(9, CPU), plain.random_numbers(9, CPU))


@given(
    many=st.lists(PARAMS, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    has_ties=st.booleans(),
)
def test_a_gpu_s_arithmetic_gives_a_row_the_same_token_in_any_company(
    many: list[SamplingParams], seed: int, has_ties: bool
) -> None:
    alone, together = ([Sampler(replace(each, seed=seed), PROMPT) for each in many] for _ in range(2))
    for number in range(3):
        logits = logits_of(len(many), seed + number, has_ties=has_ties)
        expected = [
            sample_together([sampler], row.unsqueeze(0), like_gpu=True)[0]
            for sampler, row in zip(alone, logits, strict=True)
        ]
        found = sample_together(together, logits, like_gpu=True)
        assert _without_logprobs(found) == _without_logprobs(expected)


def _without_logprobs(tokens: Sequence[SampledToken | CorollaError]) -> list[int]:
    # A CPU forms their sums in another order for another number of rows, in the last bit; a GPU does not.
    return [token.token_id for token in tokens if isinstance(token, SampledToken)]


def test_a_row_that_fails_counts_no_token() -> None:
    params = SamplingParams(1.0, seed=1, repetition_penalty=5.0, presence_penalty=2.0, frequency_penalty=2.0)
    plain, spoilt = Sampler(params, PROMPT), Sampler(params, PROMPT)
    row = logits_of(1, 1, has_ties=False)[0]
    # The choice that fails takes random numbers, too.
    plain.random_numbers(VOCABULARY_SIZE, CPU)
    bad = row.clone()
    bad[60] = torch.nan
    other = Sampler(params, PROMPT)
    (failure, _) = sample_together([spoilt, other], torch.stack((bad, row)))
    assert isinstance(failure, NonFiniteOutput)
    for _ in range(3):
        assert sample_together([spoilt, other], row.expand(2, -1))[0] == plain.sample(row)


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


@pytest.mark.parametrize("like_gpu", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [
        [SamplingParams(0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.1, seed=1)],
        [SamplingParams(0.8, top_k=7, min_p=0.1, seed=1), SamplingParams(frequency_penalty=0.3, num_logprobs=4)],
        [SamplingParams(0.8, top_p=0.9, num_logprobs=0), SamplingParams(0.8, logit_bias=((3, 7.5),), seed=2)],
    ],
)
def test_a_step_of_many_rows_takes_the_operators_of_one_of_few_rows_and_waits_once(
    kinds: list[SamplingParams], like_gpu: bool
) -> None:
    """A GPU spends more time on launches, and on waits for them, than on the numbers of 64 rows."""

    def operators(num_rows: int) -> _Operators:
        samplers = [Sampler(params, PROMPT) for params in kinds * (num_rows // len(kinds))]
        logits = logits_of(num_rows, 1, has_ties=False)
        # The first choice makes what later ones keep.
        sample_together(samplers, logits, like_gpu=like_gpu)
        for sampler in samplers:
            # Threads draw while the device computes the blocks.
            sampler.draw_ahead(VOCABULARY_SIZE, CPU, like_gpu=like_gpu)
        counted = _Operators()
        with counted:
            tokens = sample_together(samplers, logits, like_gpu=like_gpu)
        assert all(isinstance(token, SampledToken) for token in tokens)
        return counted

    few, many = operators(2), operators(64)
    assert many.num_calls == few.num_calls < 150
    assert many.num_waiting == few.num_waiting == 1


@given(
    num_rows=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    shares=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    peak=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_a_nucleus_on_a_device_is_the_exact_one_whatever_the_company(
    num_rows: int, seed: int, shares: list[float], peak: float
) -> None:
    logits = peak * torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(seed))
    probabilities = logits.sort().values.softmax(dim=-1)
    columns = torch.tensor(shares[:num_rows]).unsqueeze(1)
    found = within_shares(probabilities, columns)
    for row, (share, own) in enumerate(zip(columns[:, 0].tolist(), probabilities.tolist(), strict=True)):
        alone = within_shares(probabilities[row : row + 1], columns[row : row + 1])[0]
        assert torch.equal(alone, found[row])
        # Each probability is cut after 52 bits, so the exact sum is larger by less than this.
        tolerance = Fraction(len(own) + 1, 1 << 52)
        for is_within, total in zip(found[row].tolist(), itertools.accumulate(map(Fraction, own)), strict=True):
            assert is_within == (total <= Fraction(share)) or abs(total - Fraction(share)) <= tolerance
