"""What rows cost, from how long microbatches of different sizes take to come round."""

import math

import pytest

from corolla.block_server.ring.round_times import RoundTimes


def test_what_rows_cost_is_separated_from_the_round_itself() -> None:
    times = RoundTimes()
    assert times.rows_for_free == math.inf
    for num_rows in (1, 2, 5, 9, 30, 31, 30):
        times.observe(num_rows, 0.02 + 0.001 * num_rows)
    assert times.rows_for_free == pytest.approx(20)


def test_rounds_of_the_same_size_tell_nothing_new() -> None:
    times = RoundTimes()
    for num_rows in (1, 10, 20):
        times.observe(num_rows, 0.02 + 0.001 * num_rows)
    for number in range(1000):
        times.observe(100, 0.12 + 0.01 * (number % 2))
    assert 10 < times.rows_for_free < 40


def test_where_rows_cost_no_time_any_number_is_free() -> None:
    times = RoundTimes()
    for num_rows in (1, 50, 100):
        times.observe(num_rows, 0.02)
    assert times.rows_for_free > 10**6


def test_what_changes_is_learnt_anew() -> None:
    times = RoundTimes()
    for seconds_of_row in (0.001, 0.004):
        for number in range(400):
            num_rows = 1 + number % 40
            times.observe(num_rows, 0.02 + seconds_of_row * num_rows)
    assert times.rows_for_free == pytest.approx(5, rel=0.1)
