"""How long rounds take with so many rows, as far as it shows."""

import math
from collections.abc import Callable

import pytest

from corolla.block_server.ring.round_times import RoundTimes


def observed(seconds: Callable[[int], float], *numbers_of_rows: int) -> RoundTimes:
    times = RoundTimes()
    for num_rows in numbers_of_rows:
        times.observe(num_rows, seconds(num_rows))
    return times


def test_a_round_has_as_many_rows_as_take_so_many_times_as_long() -> None:
    times = observed(lambda num_rows: 0.02 + 0.001 * num_rows, 1, 2, 5, 9, 30, 60, 120)
    assert times.num_rows_within(2, 5) == pytest.approx(30)
    assert times.num_rows_within(3, 5) == pytest.approx(55)
    assert times.num_rows_within(2, 30) == pytest.approx(80)


def test_what_was_not_seen_is_not_limited() -> None:
    assert RoundTimes().num_rows_within(2, 1) == math.inf
    assert observed(lambda num_rows: 0.02, 1, 50, 500).num_rows_within(2, 1) == math.inf
    times = observed(lambda num_rows: 0.02 + 0.001 * num_rows, 4, 16)
    assert times.num_rows_within(2, 4) == math.inf
    times.observe(64, 0.084)
    assert times.num_rows_within(2, 4) == pytest.approx(28)


def test_fewer_rows_than_ever_seen_take_as_long_as_the_fewest() -> None:
    times = observed(lambda num_rows: 0.001 * num_rows, 8, 16, 32)
    assert times.num_rows_within(2, 1) == pytest.approx(16)
    assert times.num_rows_within(2, 1000) == math.inf


def test_rounds_that_something_else_held_up_count_little() -> None:
    times = observed(lambda num_rows: 0.02 + 0.001 * num_rows, 4, 16, 64)
    for number in range(100):
        times.observe(4, 0.024 if number % 4 else 0.2)
    assert times.num_rows_within(2, 4) == pytest.approx(28, rel=0.5)


def test_what_changes_is_learnt_anew() -> None:
    times = observed(lambda num_rows: 0.001 * num_rows, 4, 16, 64)
    for _ in range(500):
        for num_rows in (4, 16, 64):
            times.observe(num_rows, 0.1 + 0.001 * num_rows)
    assert times.num_rows_within(2, 4) == math.inf
