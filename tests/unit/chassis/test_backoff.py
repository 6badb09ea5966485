"""How soon a failed process or task is started again."""

from corolla.chassis.backoff import Backoff


def test_early_deaths_lengthen_the_backoff() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0, healthy_s=60.0)
    assert [backoff.delay_s(1.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_long_life_resets_the_backoff() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0, healthy_s=60.0)
    for _ in range(5):
        backoff.delay_s(1.0)
    assert backoff.delay_s(61.0) == 0.5
    assert backoff.delay_s(1.0) == 1.0
