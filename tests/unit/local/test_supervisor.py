"""How soon a dead process is started again, and how its end is told."""

import pytest

from corolla.local.supervisor import Backoff, describe_exit


def test_early_deaths_wait_longer_each_time() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0, healthy_s=60.0)
    assert [backoff.delay_s(1.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_long_life_forgets_them() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0, healthy_s=60.0)
    for _ in range(5):
        backoff.delay_s(1.0)
    assert backoff.delay_s(61.0) == 0.5
    assert backoff.delay_s(1.0) == 1.0


@pytest.mark.parametrize(
    "status, text",
    [(2, "ended with status 2"), (-9, "was killed by SIGKILL"), (-250, "was killed by signal 250")],
)
def test_an_end_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text
