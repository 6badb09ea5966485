"""Predictions follow what was observed, and are too long rather than too short."""

import pytest

from corolla.block_server.step_times import StepTimes, moved


def test_nothing_is_predicted_before_a_step_was_observed() -> None:
    assert StepTimes().predict([1]) is None


@pytest.mark.parametrize("follows_lengths, seconds", [(False, 0.001), (True, 0.1)])
def test_a_row_that_sees_far_more_takes_far_longer_where_latents_are_expanded(
    follows_lengths: bool, seconds: float
) -> None:
    times = StepTimes(follows_lengths=follows_lengths)
    for _ in range(50):
        times.observe(0.002, [100, 100])
    assert times.predict([10_000]) == pytest.approx(seconds)


def test_a_short_row_takes_no_less_than_any_other() -> None:
    times = StepTimes(follows_lengths=True)
    times.observe(0.001, [1000])
    assert times.predict([2]) == pytest.approx(0.001)


@pytest.mark.parametrize("follows_lengths", [False, True])
def test_predictions_err_on_the_long_side_for_what_is_larger(follows_lengths: bool) -> None:
    """Steps take 1 ms for themselves, 0.1 ms for each row and, at most, a microsecond for each token."""

    def seconds(num_seen: list[int]) -> float:
        return 1e-3 + 1e-4 * len(num_seen) + 1e-6 * follows_lengths * sum(num_seen)

    times = StepTimes(follows_lengths=follows_lengths)
    for length in range(100, 400):
        times.observe(seconds([length, length]), [length, length])
    for larger in ([400] * 8, [400, 50_000], [3000, 3000]):
        predicted = times.predict(larger)
        assert predicted is not None
        assert predicted >= seconds(larger)


def test_predictions_come_down_to_what_is_observed() -> None:
    times = StepTimes(follows_lengths=True)
    times.observe(0.5, [3])
    for length in range(1000, 1200):
        times.observe(0.004, [length])
    assert times.predict([1200]) == pytest.approx(0.004, rel=0.05)


def test_an_average_begins_with_the_first_value() -> None:
    """Planners read it after one step: a tenth of the time would make a fresh server look ten times as fast."""
    assert moved(0.0, 3.0) == 3.0
    assert moved(1.0, 2.0) == pytest.approx(1.1)
