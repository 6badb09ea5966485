"""When a recovery asks a server again that it had lost."""

from corolla.chain.quarantine import FIRST_RETRY_INTERVAL_S, LostServers


def test_a_lost_server_is_tried_again_after_a_while_and_not_for_ever() -> None:
    lost = LostServers(patience_s=5.0)
    lost.add("a", 10.0)
    assert "a" in lost
    assert lost.retryable(10.0 + FIRST_RETRY_INTERVAL_S - 0.01) == frozenset()
    assert lost.retryable(10.0 + FIRST_RETRY_INTERVAL_S) == {"a"}
    assert lost.may_return(10.0), "it is not due yet, but will be"
    lost.add("a", 12.0)
    assert lost.retryable(13.5) == frozenset(), "it has just failed again"
    assert lost.retryable(14.0) == {"a"}
    assert lost.retryable(15.0) == frozenset(), "patience counts from the first failure"
    assert not lost.may_return(15.0)
    assert "a" in lost


def test_a_server_that_stays_away_is_asked_less_and_less_often() -> None:
    lost, now_s, times = LostServers(patience_s=30.0), 0.0, list[float]()
    lost.add("a", now_s)
    while now_s < 40.0:
        now_s += 0.25
        if lost.retryable(now_s):
            times.append(now_s)
            lost.add("a", now_s)
    assert times == [0.25, 1.25, 2.5, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0, 29.0], "fewer than a request has attempts"


def test_a_server_with_useless_answers_is_not_tried_again() -> None:
    lost = LostServers(patience_s=5.0)
    lost.add("a", 10.0, for_good=True)
    lost.add("a", 10.5)
    assert lost.retryable(12.0) == frozenset()
    assert not lost.may_return(12.0)


def test_a_server_that_opened_is_lost_no_longer() -> None:
    lost = LostServers(patience_s=5.0)
    lost.add("a", 10.0)
    lost.add("b", 10.0)
    lost.discard(["a", "c"])
    assert list(lost) == ["b"]
    lost.add("a", 20.0)
    assert lost.retryable(21.0) == {"a"}, "its patience begins anew"
