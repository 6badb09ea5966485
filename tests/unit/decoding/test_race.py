"""The race in which tokens are drawn: a compiled function and operators draw the same, by the right probabilities."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopPLogitsWarper

from corolla.decoding import race
from corolla.decoding.race import Draw, Racers, drawn, drawn_by_function, drawn_by_operators, draws_as_operators, racers
from tests.philox import exponential_numbers
from tests.tiers import quick

CPU = torch.device("cpu")
WAYS = pytest.mark.parametrize("draw", [drawn_by_function, drawn_by_operators])


def rows_of(num_rows: int, width: int, spread: float, seed: int = 0) -> Tensor:
    """Probabilities of which many are equal in some rows, and some are 0."""
    scores = spread * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    scores[num_rows // 3 : num_rows // 2] = scores[num_rows // 3 : num_rows // 2].round()
    if width > 1:
        scores[num_rows // 2, ::2] = -torch.inf
    return scores.softmax(dim=-1)


TOP_P = [1.0, 0.95, 0.5, 0.01, 0.7, 1e-9, 0.95, 1.0, 0.9]
MIN_P = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.05, 1.0]


def racing(rows: Tensor, position: int = 0) -> Racers:
    seeds = [2**64 - 1 - 10**17 * index for index in range(len(rows))]
    return racers(rows, seeds, [position + 1000 * index for index in range(len(rows))], TOP_P, MIN_P)


@pytest.mark.parametrize("width", quick([1, 2, 7, 8, 9, 97, 9001], 1, 9, 9001))
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_a_compiled_function_draws_as_operators_do_and_no_row_depends_on_the_others(width: int, spread: float) -> None:
    rows = rows_of(len(TOP_P), width, spread)
    for position in range(3):
        own = racing(rows, position)
        found = drawn_by_function(rows, own)
        assert torch.equal(found, drawn_by_operators(rows, own))
        for index, each in enumerate(rows):
            alone = Racers(*(numbers[index : index + 1] for numbers in own))
            assert drawn(each.unsqueeze(0), alone).item() == found[index]


@given(
    numbers=st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_who_races_is_what_fractions_say(numbers: list[int], top_p: float, min_p: float, seed: int) -> None:
    row = torch.tensor(numbers, dtype=torch.float32) / sum(numbers)
    units = [int(Fraction(each) * 2**52) for each in row.tolist()]
    in_order = sorted(range(len(row)), key=lambda index: (units[index], index))
    share = -1 if top_p == 1 else int((1 - top_p) * 2**52)
    sums = itertools.accumulate(units[index] for index in in_order)
    stays = {index for index, total in zip(in_order, sums, strict=True) if total > share} | {in_order[-1]}
    quotients = row / exponential_numbers(seed, 9, len(row))
    least = torch.tensor(min_p) * row.max()
    candidates = [index for index in sorted(stays) if row[index] >= least]
    expected = max(candidates, key=lambda index: float(quotients[index]))
    own = racers(row.unsqueeze(0), [seed], [9], [top_p], [min_p])
    for draw in (drawn_by_function, drawn_by_operators):
        assert draw(row.unsqueeze(0), own).tolist() == [expected]


def frequencies(row: Tensor, num_draws: int, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """How often each token is drawn at one position by seeds in a row, whose keys differ least."""
    rows = row.expand(num_draws, -1).contiguous()
    own = racers(rows, range(num_draws), [0] * num_draws, [top_p] * num_draws, [min_p] * num_draws)
    return torch.bincount(drawn(rows, own), minlength=len(row)).double()


@pytest.mark.parametrize("positions", [False, True], ids=["seeds in a row", "positions in a row"])
def test_tokens_are_as_frequent_as_they_are_probable(positions: bool) -> None:
    row = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005])
    num_draws = 40_000
    rows = row.expand(num_draws, -1).contiguous()
    numbers, same = range(num_draws), [5] * num_draws
    seeds, places = (same, numbers) if positions else (numbers, same)
    own = racers(rows, seeds, places, [1.0] * num_draws, [0.0] * num_draws)
    counts = torch.bincount(drawn(rows, own), minlength=len(row)).double()
    expected = row.double() * num_draws
    # One sample in a thousand has a sum above 27.9 with nine degrees of freedom; the numbers are always the same.
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9


def test_what_filters_keep_is_as_frequent_as_it_is_probable() -> None:
    row = torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2])
    counts = frequencies(row, 40_000, top_p=0.92)
    # Top-p excludes the lowest id among equal ones.
    kept = torch.tensor([0.0, 0.4, 0.3, 0.05, 0.2]).double()
    expected = kept / kept.sum() * 40_000
    assert counts[0] == 0
    assert float(((counts - expected)[1:] ** 2 / expected[1:]).sum()) < 16.3


@pytest.mark.full
def test_tokens_of_probability_1e_8_win_as_often_as_they_should() -> None:
    """A million of them beside one that takes nearly everything: 1.05 draws of a hundred are theirs."""
    width, num_draws = 1 << 20, 400
    row = torch.full((1, width), 1e-8)
    row[0, width // 2] = 1 - 1e-8 * (width - 1)
    own = [racers(row, [7], [position], [1.0], [0.0]) for position in range(num_draws)]
    wins = [token for each in own if (token := int(drawn(row, each))) != width // 2]
    # The numbers are always the same. A race of numbers with 24 bits, or without the smallest ones, is far from 4.2.
    assert 1 <= len(wins) <= 10
    assert len(set(wins)) == len(wins)


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_filters_keep_what_those_of_transformers_keep(spread: float) -> None:
    """But where a border lies within the rounding of the sums, which no row of these does."""
    scores = spread * torch.randn(40, 1000, generator=torch.Generator().manual_seed(1))
    rows = scores.softmax(dim=-1)
    for filters in (TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        top_p, min_p = (0.9, 0.0) if isinstance(filters, TopPLogitsWarper) else (1.0, 0.05)
        no_ids: Any = torch.empty((1, 0), dtype=torch.int64)
        expected = filters(no_ids, scores).softmax(dim=-1)
        for position in range(10):
            numbers = torch.stack([exponential_numbers(seed, position, 1000) for seed in range(len(rows))])
            own = racers(rows, range(len(rows)), [position] * len(rows), [top_p] * len(rows), [min_p] * len(rows))
            assert torch.equal(drawn(rows, own), (expected / numbers).argmax(dim=-1))


@WAYS
def test_a_row_that_is_not_finite_has_no_token(draw: Draw) -> None:
    rows = torch.stack((torch.full((5,), torch.nan), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), torch.zeros(5)))
    for top_p, min_p in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.1), (0.5, 0.1)):
        own = racers(rows, [1, 2, 3], [0, 0, 0], [top_p] * 3, [min_p] * 3)
        assert draw(rows, own).tolist() == [-1, 2, -1]


def test_operators_draw_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(missing: Sequence[str]) -> Draw:
        monkeypatch.setattr(race, "why_unavailable", lambda: missing)
        race.way_of.cache_clear()
        return race.way_of(CPU)

    try:
        assert way("no llvmlite") is drawn_by_operators
        assert way("") is drawn_by_function
    finally:
        race.way_of.cache_clear()


def test_a_trial_finds_draws_that_differ() -> None:
    def without_top_p(rows: Tensor, own: Racers) -> Tensor:
        return drawn_by_function(rows, Racers(own.keys, own.positions, -own.shares, own.least))

    assert draws_as_operators(CPU, drawn_by_function)
    assert not draws_as_operators(CPU, without_top_p)
