"""When a token is late, and what silence proves."""

import math

import pytest

from corolla.chain.lateness import TokenWaits, may_blame, overslept


def test_a_token_is_late_after_three_times_the_longest_of_the_newest_waits() -> None:
    waits = TokenWaits()
    for _ in range(7):
        waits.add(0.04)
    assert waits.late_after_s == math.inf, "too few tokens tell nothing"
    waits.add(0.1)
    assert waits.late_after_s == pytest.approx(0.3)
    for _ in range(64):
        waits.add(0.001)
    assert waits.late_after_s == 0.05, "an old wait no longer counts, and quick tokens are not late at once"


def test_a_process_that_was_held_up_blames_nobody() -> None:
    assert not overslept(asked_s=7.0, answer_s=0.1, now_s=7.11)
    assert overslept(asked_s=7.0, answer_s=0.1, now_s=7.2)


@pytest.mark.parametrize("num_silent, num_servers, may", [(1, 2, True), (2, 4, False), (2, 8, True), (3, 8, False)])
def test_many_silent_servers_tell_of_a_slow_machine(num_silent: int, num_servers: int, *, may: bool) -> None:
    assert may_blame(num_silent, num_servers) is may
