"""An address that is refused too often waits."""

import pytest

from corolla.chassis.errors import QueueFull
from corolla.issuer.attempts import MOST_REFUSALS, WINDOW_S, Attempts


def test_an_address_is_refused_so_often_in_a_minute_and_others_are_not_affected() -> None:
    attempts = Attempts()
    for _ in range(MOST_REFUSALS):
        attempts.begin("a", 10.0)
    with pytest.raises(QueueFull) as full:
        attempts.begin("a", 20.0)
    assert full.value.retry_after_s == WINDOW_S - 10.0
    attempts.begin("b", 20.0)
    attempts.begin("a", 10.0 + WINDOW_S)
    attempts.begin("a", 10.0 + WINDOW_S)


def test_what_was_not_refused_counts_only_while_it_runs() -> None:
    attempts = Attempts()
    for _ in range(10 * MOST_REFUSALS):
        attempts.begin("a", 10.0)
        attempts.take_back("a")
    for _ in range(MOST_REFUSALS):
        attempts.begin("a", 10.0)
    with pytest.raises(QueueFull):
        attempts.begin("a", 10.0)
    attempts.take_back("a")
    attempts.begin("a", 10.0)


def test_a_flood_from_many_addresses_takes_bounded_memory() -> None:
    attempts = Attempts()
    for number in range(10_000):
        attempts.begin(str(number), 1.0)
    assert len(attempts) <= 4096
