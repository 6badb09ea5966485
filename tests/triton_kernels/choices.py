"""Tokens that kernels draw are those that processors draw."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError
from corolla.decoding import batched_sampling, nucleus
from corolla.decoding.batched_sampling import sample_together
from corolla.decoding.kernel_trials import failed_trial
from corolla.decoding.nucleus import NO_SHARE, draw_by_filter, draws_as_operators, keeps_as_a_sort, launched_draw
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.penalties import penalises_as_operators
from corolla.decoding.random_jump import words_of
from corolla.decoding.random_streams import RandomStreams, draws_as_a_cpu, launched_numbers
from corolla.decoding.sampling import Sampler, exponential_of
from corolla.wire.device_copies import await_copies
from tests.tiers import quick
from tests.triton_kernels import DEVICE

PLACE = torch.zeros(1, device=DEVICE).device


def generator_of(seed: int, *widths: int) -> torch.Generator:
    """A generator that has drawn so many numbers."""
    generator = torch.Generator().manual_seed(seed)
    for width in widths:
        drawn(generator, width)
    return generator


def drawn(generator: torch.Generator, width: int) -> Tensor:
    return torch.rand(width, dtype=torch.float64, generator=generator)


def state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


@pytest.mark.parametrize("width", quick([1, 97, 311, 312, 313, 4099, 20_000], 312))
@torch.inference_mode()
def test_streams_of_a_device_give_the_numbers_of_generators(width: int) -> None:
    # One is new, others stand in the middle, at the beginning and at the end of a block.
    generators = [generator_of(1), generator_of(2, 5, 700), generator_of(3, 313), generator_of(4, 312), generator_of(5)]
    streams = RandomStreams(PLACE)
    slots = [streams.begin(state_of(each)) for each in generators]
    for step in range(3):
        # Each step has other rows, in another order.
        rows = [(step + index) % 5 for index in range(5 - step)]
        draw = streams.draw([slots[row] for row in rows], width)
        await_copies(PLACE)
        expected_numbers = torch.stack([-drawn(generators[row], width) for row in rows]).to(DEVICE)
        assert torch.equal(draw.numbers, exponential_of(expected_numbers))
        for row, (words, num_used) in zip(rows, draw.moved(), strict=True):
            expected, expected_used = words_of(state_of(generators[row]))
            assert num_used == expected_used
            assert words.tolist() == expected.tolist()


@pytest.mark.parametrize("width", quick([1, 97, 4096, 9000], 97))
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_drawn_tokens_are_those_of_operators_and_no_row_depends_on_the_others(width: int, spread: float) -> None:
    shares = torch.tensor([0.0, 0.05, 0.5, 0.99, 1.0, NO_SHARE, 0.3], device=DEVICE)
    units = (shares.double() * 2.0**nucleus.PROBABILITY_BITS).long()
    generator = torch.Generator().manual_seed(width)
    scores = spread * torch.randn(len(units), width, generator=generator)
    # Many tokens of one score, both zeros, and tokens that a grammar bars.
    scores[2:4] = scores[2:4].round()
    scores[6, ::2] = -torch.inf if width > 1 else 0.0
    scores[5, : width // 2] *= -0.0
    scores = scores.to(DEVICE)
    probabilities = scores.softmax(dim=-1)
    for _ in range(4):
        numbers = torch.empty(scores.shape).exponential_(generator=generator).to(DEVICE)
        found = launched_draw(scores, probabilities, numbers, units)
        assert torch.equal(found, draw_by_filter(scores, probabilities, numbers, units))
        for index in range(len(units)):
            own = [each[index : index + 1].contiguous() for each in (scores, probabilities, numbers, units)]
            assert torch.equal(found[index : index + 1], launched_draw(own[0], own[1], own[2], own[3]))


def test_a_draw_from_a_row_that_is_not_finite_ends_and_leaves_the_others_alone() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    numbers, units = torch.ones_like(scores), torch.full((4,), 2**51, device=DEVICE)
    expected = launched_draw(scores, scores.softmax(dim=-1), numbers, units)
    scores[1, 7], scores[2] = torch.nan, -torch.inf
    found = launched_draw(scores, scores.softmax(dim=-1), numbers, units)
    assert found[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert ((found >= 0) & (found < 50)).all()


def test_samplers_whose_streams_lie_on_a_device_choose_what_they_choose_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        SamplingParams(1.5, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.2, num_logprobs=2),
        SamplingParams(0.8, top_k=5, min_p=0.01, top_p=0.9),
        SamplingParams(0.0, frequency_penalty=0.3),
        SamplingParams(1.0, top_p=0.3, logit_bias=((3, 4.0),)),
        SamplingParams(1.0),
    ]

    def samplers() -> list[Sampler]:
        seeded = [replace(each, seed=seed) for seed, each in enumerate(many)]
        return [Sampler(each, (3, 1, 4), num_skipped=seed) for seed, each in enumerate(seeded)]

    plain, there = samplers(), samplers()
    streams = RandomStreams(PLACE)
    generator = torch.Generator().manual_seed(0)
    all_logits = 2 * torch.randn(8, len(many), 97, generator=generator)
    for step, logits in enumerate(all_logits):
        rows = [(step + index) % len(many) for index in range(len(many) - step % 3)]
        with monkeypatch.context() as patch:
            expected = tokens(sample_together([plain[row] for row in rows], logits[rows].to(DEVICE), like_gpu=True))
            patch.setattr(batched_sampling, "streams_of", lambda _device: streams)
            patch.setattr(nucleus, "draw_kernel_holds", lambda _device: True)
            found = sample_together([there[row] for row in rows], logits[rows].to(DEVICE), like_gpu=True)
        assert tokens(found) == expected
        assert [each.state() for each in there] == [each.state() for each in plain]
        if step == 4:
            # A draft model reads from a copy of the stream, on the CPU; the stream itself does not move.
            forks = [each.fork().random_numbers(97, torch.device("cpu")) for each in (there[0], plain[0])]
            assert torch.equal(*forks)
            # A server without the kernels goes on with the stream, and gives it back.
            numbers = [each.random_numbers(97, torch.device("cpu")) for each in (there[3], plain[3])]
            assert torch.equal(*numbers)


def tokens(chosen: Sequence[SampledToken | CorollaError]) -> list[int]:
    assert all(isinstance(each, SampledToken) for each in chosen)
    return [each.token_id for each in chosen if isinstance(each, SampledToken)]


def test_kernels_that_fail_or_differ_give_way_to_operators() -> None:
    def failing(*_tensors: object) -> Tensor:
        raise NotImplementedError("no such instruction\nat line 7")

    def other_numbers(streams: Tensor, slots: Tensor, width: int) -> Tensor:
        return launched_numbers(streams, slots, width).flip(0)

    trials: list[tuple[Callable[..., bool], str, Callable[..., Tensor]]] = [
        (keeps_as_a_sort, "keep", lambda scores, _shares: scores),
        (draws_as_operators, "draw", lambda scores, *_others: scores.argmax(dim=-1)),
        (draws_as_a_cpu, "draw_negated", other_numbers),
        (penalises_as_operators, "penalise", lambda logits, *_others: logits),
    ]
    for trial, name, wrong in trials:
        assert failed_trial(PLACE, trial) is None
        assert failed_trial(PLACE, functools.partial(trial, **{name: wrong})) == "its results differ"
        failure = failed_trial(PLACE, functools.partial(trial, **{name: failing}))
        assert failure == "NotImplementedError: no such instruction"
