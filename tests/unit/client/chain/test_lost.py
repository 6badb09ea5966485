"""When a recovery asks a server again that it had lost."""

from corolla.client.chain.lost import RETRY_INTERVAL_S, LostServers


def test_a_lost_server_is_tried_again_after_a_while_and_not_for_ever() -> None:
    lost = LostServers(patience_s=5.0)
    lost.add("a", 10.0)
    assert "a" in lost
    assert lost.due(10.0 + RETRY_INTERVAL_S - 0.01) == frozenset()
    assert lost.due(10.0 + RETRY_INTERVAL_S) == {"a"}
    lost.add("a", 12.0)
    assert lost.due(13.5) == frozenset(), "it has just failed again"
    assert lost.due(14.0) == {"a"}
    assert lost.due(15.0) == frozenset(), "patience counts from the first failure"
    assert "a" in lost


def test_a_server_that_stays_away_is_asked_less_and_less_often() -> None:
    lost, now_s, times = LostServers(patience_s=30.0), 0.0, list[float]()
    lost.add("a", now_s)
    while now_s < 40.0:
        now_s += 0.25
        if lost.due(now_s):
            times.append(now_s)
            lost.add("a", now_s)
    assert times == [1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0], "fewer than a request has attempts"


def test_a_server_whose_answers_are_of_no_use_is_not_tried_again() -> None:
    lost = LostServers(patience_s=5.0)
    lost.add("a", 10.0, for_good=True)
    lost.add("a", 10.5)
    assert lost.due(12.0) == frozenset()


def test_a_server_that_opened_is_lost_no_longer() -> None:
    lost = LostServers(patience_s=5.0)
    lost.add("a", 10.0)
    lost.add("b", 10.0)
    lost.returned(["a", "c"])
    assert list(lost) == ["b"]
    lost.add("a", 20.0)
    assert lost.due(21.0) == {"a"}, "its patience begins anew"
