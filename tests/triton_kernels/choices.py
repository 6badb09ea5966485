"""Tokens that kernels choose are those that operators choose."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError
from corolla.decoding import sampling
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.race import (
    Racers,
    drawn_by_kernel,
    drawn_by_operators,
    draws_as_operators,
    failed_trial,
    racers,
)
from corolla.decoding.sampling import Sampler, sample_together
from tests.tiers import quick
from tests.triton_kernels import DEVICE

PLACE = torch.zeros(1, device=DEVICE).device


TOP_P = [1.0, 0.95, 0.5, 0.01, 0.7, 1e-9, 0.95, 1.0, 0.9]
MIN_P = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.05, 1.0]
SEEDS = [2**64 - 1 - 10**17 * index for index in range(len(TOP_P))]


@pytest.mark.parametrize("width", quick([1, 97, 4096, 9001], 97))
@pytest.mark.parametrize("spread", quick([0.0, 1.0, 30.0], 1.0))
def test_drawn_tokens_are_those_of_operators_and_no_row_depends_on_the_others(width: int, spread: float) -> None:
    scores = spread * torch.randn(len(TOP_P), width, generator=torch.Generator().manual_seed(width))
    # Many tokens of one probability, and tokens that a grammar bars.
    scores[2:4] = scores[2:4].round()
    scores[6, ::2] = -torch.inf if width > 1 else 0.0
    rows = scores.to(DEVICE).softmax(dim=-1)
    for position in (0, 1, 2**31):
        own = racers(rows, SEEDS, [position] * len(rows), TOP_P, MIN_P)
        found = drawn_by_kernel(rows, own)
        assert torch.equal(found, drawn_by_operators(rows, own))
        for index, each in enumerate(rows):
            alone = Racers(*(numbers[index : index + 1] for numbers in own))
            assert torch.equal(found[index : index + 1], drawn_by_kernel(each.unsqueeze(0), alone))


def test_a_draw_from_a_row_that_is_not_finite_ends_and_leaves_the_others_alone() -> None:
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def draw() -> list[int]:
        rows = scores.softmax(dim=-1)
        tokens: list[int] = drawn_by_kernel(rows, racers(rows, SEEDS[:4], [0] * 4, [0.5] * 4, [0.0] * 4)).tolist()
        return tokens

    expected = draw()
    scores[1, 7], scores[2] = torch.nan, -torch.inf
    assert draw() == [expected[0], -1, -1, expected[3]]


def test_samplers_choose_by_the_kernel_what_operators_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        SamplingParams(1.5, top_p=0.8, repetition_penalty=1.3, presence_penalty=0.2, num_logprobs=2),
        SamplingParams(0.8, top_k=5, min_p=0.01, top_p=0.9),
        SamplingParams(0.0, frequency_penalty=0.3),
        SamplingParams(1.0, top_p=0.3, logit_bias=((3, 4.0),)),
        SamplingParams(1.0),
    ]

    def samplers() -> list[Sampler]:
        return [Sampler(replace(each, seed=seed), (3, 1, 4), position=seed) for seed, each in enumerate(many)]

    plain, there = samplers(), samplers()
    all_logits = 2 * torch.randn(8, len(many), 97, generator=torch.Generator().manual_seed(0))
    for step, logits in enumerate(all_logits):
        rows = [(step + index) % len(many) for index in range(len(many) - step % 3)]
        found = []
        for side, draw in ((plain, drawn_by_operators), (there, drawn_by_kernel)):
            monkeypatch.setattr(sampling, "drawn", draw)
            found.append(tokens(sample_together([side[row] for row in rows], logits[rows].to(DEVICE))))
        assert found[0] == found[1]


def tokens(chosen: Sequence[SampledToken | CorollaError]) -> list[int]:
    assert all(isinstance(each, SampledToken) for each in chosen)
    return [each.token_id for each in chosen if isinstance(each, SampledToken)]


def test_kernels_that_fail_or_differ_give_way_to_operators() -> None:
    def failing(*_tensors: object) -> Tensor:
        raise NotImplementedError("no such instruction\nat line 7")

    trials: list[tuple[Callable[..., bool], str, Callable[..., Tensor]]] = [
        (draws_as_operators, "draw", lambda rows, *_others: rows.argmax(dim=-1)),
    ]
    for trial, name, wrong in trials:
        assert failed_trial(PLACE, trial) is None
        assert failed_trial(PLACE, functools.partial(trial, **{name: wrong})) == "its results differ"
        failure = failed_trial(PLACE, functools.partial(trial, **{name: failing}))
        assert failure == "NotImplementedError: no such instruction"
