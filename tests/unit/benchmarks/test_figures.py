"""Benchmarks' figures: percentiles, ratios within rounds, verdicts."""

import pytest

from benchmarks.figures import Target, at_least, at_most, figure, percentile, ratio
from benchmarks.timing import Timing


@pytest.mark.parametrize("percent, expected", [(1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, expected: float) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 99) == 7.0


def test_ratios_are_formed_within_each_round() -> None:
    found = ratio("one / other", [1.0, 10.0, 4.0], [2.0, 2.0, 2.0]).spread
    assert (found.median, found.smallest, found.largest) == (2.0, 0.5, 5.0)


@pytest.mark.parametrize(
    "value, target, verdict",
    [
        (1.0, at_least(1.0), "reached"),
        (0.99, at_least(1.0), "NOT REACHED"),
        (250, at_most(250), "reached"),
        (251, at_most(250), "NOT REACHED"),
        (1, None, ""),
    ],
)
def test_the_median_decides(value: float, target: Target | None, verdict: str) -> None:
    assert figure("any", "x", [0.0, value, 1e9], target).verdict == verdict


def test_speed_counts_tokens_and_time_after_the_first() -> None:
    timing = Timing(10.0, (12.0, 12.5, 13.0, 13.5, 14.0))
    assert timing.first_token_s == 2.0
    assert timing.tokens_per_s == 2.0
    assert timing.gaps_s == [0.5] * 4
