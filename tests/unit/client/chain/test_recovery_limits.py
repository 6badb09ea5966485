"""When a server is left out, and when a request has had enough."""

import pytest

from corolla.chassis.errors import HopLeaving, HopUnavailable, NonFiniteOutput, RequestKillsServers
from corolla.client.chain.account import MAX_REPLAY_DEATHS, RecoveryAccount
from corolla.client.chain.quarantine import FIRST_S, MOST_S, Quarantine
from corolla.wire.span import Span


def test_a_server_comes_back_after_a_while_and_later_if_it_fails_again() -> None:
    quarantine = Quarantine()
    assert quarantine.add("a", 10.0)
    assert not quarantine.add("a", 11.0), "the second session that lost it says nothing new"
    assert quarantine.active(10.0 + FIRST_S - 0.1) == {"a"}
    assert quarantine.active(10.0 + FIRST_S) == frozenset()
    assert quarantine.add("a", 20.0)
    assert quarantine.active(20.0 + 2 * FIRST_S - 0.1) == {"a"}
    now_s = 40.0
    for _ in range(9):
        quarantine.add("a", now_s)
        assert quarantine.active(now_s + MOST_S) == frozenset()
        now_s += MOST_S
    assert quarantine.add("a", now_s + 3 * MOST_S)
    assert quarantine.active(now_s + 3 * MOST_S + FIRST_S) == frozenset(), "forgiven"


def test_a_request_whose_step_kills_two_servers_is_not_tried_on_a_third() -> None:
    account = RecoveryAccount(16)
    account.died(Span(0, 3), position=7)
    account.died(Span(3, 6), position=7)
    with pytest.raises(RequestKillsServers):
        account.died(Span(2, 4), position=7)


def test_servers_may_die_again_and_again_as_long_as_the_request_gets_further() -> None:
    account = RecoveryAccount(16)
    for position in range(10):
        account.died(Span(0, 3), position)


def test_servers_that_die_in_a_replay_are_chance_for_a_while() -> None:
    account = RecoveryAccount(16)
    account.died(Span(0, 3), position=7)
    for _ in range(MAX_REPLAY_DEATHS - 1):
        account.died_in_replay()
    with pytest.raises(RequestKillsServers):
        account.died_in_replay()


def test_a_hop_that_reaches_nobody_is_found_out_at_the_second_time() -> None:
    account = RecoveryAccount(16)
    assert not account.cut_off("a:1", position=7)
    assert not account.cut_off("b:1", position=7)
    assert account.cut_off("a:1", position=7)
    assert not account.cut_off("a:1", position=8), "the request got further"


def test_attempts_are_counted_over_all_recoveries() -> None:
    account = RecoveryAccount(2)
    failure = HopUnavailable("lost")
    account.begin(failure)
    account.begin(failure)
    with pytest.raises(HopUnavailable):
        account.begin(failure)


def test_nobody_waits_longer_for_a_replacement_than_the_caller_does() -> None:
    assert RecoveryAccount(16).patience_s(30.0, now_s=1e6) == 30.0
    account = RecoveryAccount(16, until_s=100.0)
    assert [account.patience_s(30.0, now_s) for now_s in (60.0, 95.0, 120.0)] == [30.0, 5.0, 0.0]


def test_the_second_output_that_is_no_number_is_the_requests_own() -> None:
    account = RecoveryAccount(16)
    failure = NonFiniteOutput("nan")
    account.non_finite(failure)
    with pytest.raises(NonFiniteOutput):
        account.non_finite(failure)


def test_servers_that_leave_cost_a_long_answer_none_of_its_attempts() -> None:
    account = RecoveryAccount(1)
    for _ in range(40):
        account.begin(HopLeaving("drains"))
    account.begin(HopUnavailable("lost"))
    with pytest.raises(HopUnavailable):
        account.begin(HopUnavailable("lost"))
