"""When a server is left out, and when a request has had enough."""

import pytest

from corolla.chain.quarantine import FIRST_QUARANTINE_S, MOST_QUARANTINE_S, Quarantine
from corolla.chain.recovery_budget import MAX_REPLAY_DEATHS, Action, RecoveryBudget, classify
from corolla.chassis.errors import (
    CorollaError,
    HopLate,
    HopLeaving,
    HopSessionLost,
    HopUnavailable,
    NonFiniteOutput,
    NotComputed,
    OutOfMemory,
    OutOfPages,
    OutputsNotKept,
    QueueFull,
    RequestKillsServers,
    RouteUnknown,
    StepFailed,
)
from corolla.wire.span import Span


def test_a_server_comes_back_after_a_while_and_later_if_it_fails_again() -> None:
    quarantine = Quarantine[str]()
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


def lost(reporter: str = "") -> HopUnavailable:
    failure = HopUnavailable("lost", "c:1")
    failure.reporter = reporter
    return failure


LOST = lost("b:1")


def test_a_request_whose_step_kills_two_servers_is_not_tried_on_a_third() -> None:
    budget = RecoveryBudget(16)
    budget.spend(Action.REPLACE, LOST, 7, [Span(0, 3)])
    budget.spend(Action.REPLACE, LOST, 7, [Span(3, 6)])
    with pytest.raises(RequestKillsServers):
        budget.spend(Action.REPLACE, LOST, 7, [Span(2, 4)])


def test_servers_may_die_again_and_again_as_long_as_the_request_gets_further() -> None:
    budget = RecoveryBudget(16)
    for position in range(10):
        budget.spend(Action.REPLACE, LOST, position, [Span(0, 3)])


def test_a_few_deaths_in_replays_are_not_blamed_on_the_request() -> None:
    budget = RecoveryBudget(16)
    budget.spend(Action.REPLACE, LOST, 7, [Span(0, 3)])
    for _ in range(MAX_REPLAY_DEATHS - 1):
        budget.spend(Action.REPLACE, LOST, 7, [Span(0, 3)], in_replay=True)
    with pytest.raises(RequestKillsServers):
        budget.spend(Action.REPLACE, LOST, 7, [Span(0, 3)], in_replay=True)


def test_a_hop_that_reaches_no_peer_is_blamed_at_the_second_failure() -> None:
    budget = RecoveryBudget(16)
    reports = [("a:1", 7), ("b:1", 7), ("a:1", 7), ("a:1", 8)]
    blamed = [budget.spend(Action.REPLACE_EITHER, lost(reporter), position) for reporter, position in reports]
    assert blamed == [False, False, True, False], "at position 8 the request got further"


def test_attempts_are_counted_over_all_recoveries() -> None:
    budget = RecoveryBudget(2)
    for action in (Action.REPLACE, Action.FILL):
        budget.spend(action, LOST, 7)
    for action in (Action.REPLACE, Action.FILL, Action.FILL_IN_PLACE, Action.REPLACE_EITHER, Action.REPLACE_FOR_GOOD):
        with pytest.raises(HopUnavailable):
            budget.spend(action, LOST, 7)


@pytest.mark.parametrize(
    "failure, action",
    [
        (HopUnavailable("lost", "a:1"), Action.REPLACE), (RouteUnknown("unknown", "a:1"), Action.REPLACE),
        (HopLate("late", "a:1"), Action.REPLACE_HERE),
        (NonFiniteOutput("not finite"), Action.REPLACE_FOR_GOOD), (HopLeaving("drains"), Action.FOLLOW),
        (HopSessionLost("evicted"), Action.FILL), (OutputsNotKept("evicted"), Action.FILL),
        (OutOfPages("full"), Action.FILL_IN_PLACE), (QueueFull("full"), Action.GIVE_UP),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CorollaError) else "",
)  # fmt: skip
def test_each_failure_has_its_action(failure: CorollaError, action: Action) -> None:
    assert classify(failure, is_alive=True) is action
    if action is Action.GIVE_UP:
        with pytest.raises(type(failure)):
            RecoveryBudget(16).spend(action, failure, 7)


def test_hedges_leave_attempts_for_hops_that_are_lost() -> None:
    budget = RecoveryBudget(4)
    for position in range(2):
        assert budget.may_hedge
        budget.spend(Action.REPLACE_HERE, HopLate("late", "a:1"), position)
    assert not budget.may_hedge
    budget.spend(Action.REPLACE, LOST, 2)


def test_a_hop_that_only_another_one_cannot_reach_is_not_simply_lost() -> None:
    assert classify(LOST, is_alive=True) is Action.REPLACE_EITHER
    assert classify(LOST, is_alive=False) is Action.REPLACE


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
    budget.spend(classify(first("the first")), first("the first"), 7)
    with pytest.raises(second, match="the second"):
        budget.spend(classify(second("the second")), second("the second"), 8)


def test_servers_that_leave_cost_a_long_answer_none_of_its_attempts() -> None:
    budget = RecoveryBudget(1)
    for _ in range(40):
        budget.spend(Action.FOLLOW, HopLeaving("drains"), 7)
    budget.spend(Action.REPLACE, LOST, 7)
    with pytest.raises(HopUnavailable):
        budget.spend(Action.REPLACE, LOST, 7)
