"""When a server is left out, and when a request has had enough."""

import pytest

from corolla.chain.quarantine import FIRST_QUARANTINE_S, MOST_QUARANTINE_S, Quarantine
from corolla.chain.recovery_budget import MAX_REPLAY_DEATHS, RecoveryBudget
from corolla.chassis.errors import (
    HopLeaving,
    HopUnavailable,
    NonFiniteOutput,
    NotComputed,
    OutOfMemory,
    RequestKillsServers,
    StepFailed,
)
from corolla.wire.span import Span


def test_a_server_comes_back_after_a_while_and_later_if_it_fails_again() -> None:
    quarantine = Quarantine()
    assert quarantine.add("a", 10.0)
    assert not quarantine.add("a", 11.0), "the second session that lost it says nothing new"
    assert quarantine.active(10.0 + FIRST_QUARANTINE_S - 0.1) == {"a"}
    assert quarantine.active(10.0 + FIRST_QUARANTINE_S) == frozenset()
    assert quarantine.add("a", 20.0)
    assert quarantine.active(20.0 + 2 * FIRST_QUARANTINE_S - 0.1) == {"a"}
    now_s = 40.0
    for _ in range(9):
        quarantine.add("a", now_s)
        assert quarantine.active(now_s + MOST_QUARANTINE_S) == frozenset()
        now_s += MOST_QUARANTINE_S
    assert quarantine.add("a", now_s + 3 * MOST_QUARANTINE_S)
    assert quarantine.active(now_s + 3 * MOST_QUARANTINE_S + FIRST_QUARANTINE_S) == frozenset(), "forgiven"


def test_a_request_whose_step_kills_two_servers_is_not_tried_on_a_third() -> None:
    budget = RecoveryBudget(16)
    budget.on_death(Span(0, 3), position=7)
    budget.on_death(Span(3, 6), position=7)
    with pytest.raises(RequestKillsServers):
        budget.on_death(Span(2, 4), position=7)


def test_servers_may_die_again_and_again_as_long_as_the_request_gets_further() -> None:
    budget = RecoveryBudget(16)
    for position in range(10):
        budget.on_death(Span(0, 3), position)


def test_a_few_deaths_in_replays_are_not_blamed_on_the_request() -> None:
    budget = RecoveryBudget(16)
    budget.on_death(Span(0, 3), position=7)
    for _ in range(MAX_REPLAY_DEATHS - 1):
        budget.on_death_in_replay()
    with pytest.raises(RequestKillsServers):
        budget.on_death_in_replay()


def test_a_hop_that_reaches_no_peer_is_blamed_at_the_second_failure() -> None:
    budget = RecoveryBudget(16)
    assert not budget.on_unreachable("a:1", position=7)
    assert not budget.on_unreachable("b:1", position=7)
    assert budget.on_unreachable("a:1", position=7)
    assert not budget.on_unreachable("a:1", position=8), "the request got further"


def test_attempts_are_counted_over_all_recoveries() -> None:
    budget = RecoveryBudget(2)
    failure = HopUnavailable("lost")
    budget.take_attempt(failure)
    budget.take_attempt(failure)
    with pytest.raises(HopUnavailable):
        budget.take_attempt(failure)


def test_a_recovery_waits_no_longer_than_its_caller() -> None:
    assert RecoveryBudget(16).patience_s(30.0, now_s=1e6) == 30.0
    budget = RecoveryBudget(16, until_s=100.0)
    assert [budget.patience_s(30.0, now_s) for now_s in (60.0, 95.0, 120.0)] == [30.0, 5.0, 0.0]


@pytest.mark.parametrize("first", [NonFiniteOutput, StepFailed, OutOfMemory])
@pytest.mark.parametrize("second", [NonFiniteOutput, StepFailed, OutOfMemory])
def test_a_step_that_two_servers_cannot_compute_is_blamed_on_its_request(
    first: type[NotComputed], second: type[NotComputed]
) -> None:
    budget = RecoveryBudget(16)
    budget.on_not_computed(first("the first"))
    with pytest.raises(second, match="the second"):
        budget.on_not_computed(second("the second"))


def test_servers_that_leave_cost_a_long_answer_none_of_its_attempts() -> None:
    budget = RecoveryBudget(1)
    for _ in range(40):
        budget.take_attempt(HopLeaving("drains"))
    budget.take_attempt(HopUnavailable("lost"))
    with pytest.raises(HopUnavailable):
        budget.take_attempt(HopUnavailable("lost"))
