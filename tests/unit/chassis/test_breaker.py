"""When a silent peer is asked again."""

from corolla.chassis.breaker import Breaker


def opened() -> Breaker:
    breaker = Breaker(max_failures=2, rest_s=0.5)
    for now_s in (0.0, 1.0):
        assert breaker.admits(now_s)
        breaker.failed(now_s)
    return breaker


def test_the_breaker_opens_only_after_consecutive_failures() -> None:
    breaker = Breaker(max_failures=2, rest_s=0.5)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.succeeded()
    breaker.failed(0.0)
    assert breaker.admits(0.0)
    breaker.failed(0.0)
    assert not breaker.admits(0.0)


def test_an_open_breaker_lets_one_call_through_per_pause() -> None:
    breaker = opened()
    assert not breaker.admits(1.4)
    assert [breaker.admits(now_s) for now_s in (1.5, 1.5, 1.9, 2.0, 2.1)] == [True, False, False, True, False]


def test_one_success_closes_the_breaker() -> None:
    breaker = opened()
    assert breaker.admits(1.5)
    breaker.succeeded()
    assert [breaker.admits(1.5) for _ in range(3)] == [True, True, True]


def test_a_failed_call_starts_the_pause_anew() -> None:
    breaker = opened()
    assert breaker.admits(1.5)
    breaker.failed(1.75)
    assert not breaker.admits(2.2)
    assert breaker.admits(2.25)
