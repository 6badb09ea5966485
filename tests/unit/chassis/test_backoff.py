"""How soon a failed process or task is started again."""

from corolla.chassis.backoff import Backoff


def test_early_deaths_lengthen_the_backoff_and_a_long_life_resets_it() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(1.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff.delay_s(61.0) == 0.5
    assert backoff.delay_s(1.0) == 1.0
