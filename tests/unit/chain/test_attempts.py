import pytest

from corolla.chain.quarantine import FIRST_RETRY_INTERVAL_S
from corolla.chain.reservations import Attempts
from corolla.chassis.errors import CorollaError, HopLeaving, HopUnavailable, InvalidRequest, OutOfPages, QueueFull
from corolla.v1 import common_pb2

HOP = common_pb2.Hop(server_id="a")
CHAIN = common_pb2.Chain(hops=[common_pb2.Hop(server_id="b"), HOP])


def lost() -> HopUnavailable:
    return HopUnavailable("a hop of the chain was lost")


def test_a_server_that_was_not_reached_is_asked_again_as_the_last_resort() -> None:
    attempts = Attempts(30.0)
    assert not any(hop.server_id in attempts.lost for hop in CHAIN.hops)
    attempts.record([(HOP, lost())], 10.0)
    assert any(hop.server_id in attempts.lost for hop in CHAIN.hops)
    later_s = 10.0 + FIRST_RETRY_INTERVAL_S
    assert attempts.excluded(10.0, as_last_resort=True) == {"a"}
    assert attempts.excluded(later_s, as_last_resort=False) == {"a"}
    assert attempts.excluded(later_s, as_last_resort=True) == set()
    assert attempts.num_refused == 0


def test_a_failure_seen_by_many_sessions_in_one_attempt_counts_once() -> None:
    attempts = Attempts(30.0)
    attempts.record([(HOP, lost()), (HOP, lost()), (HOP, lost())], 10.0)
    assert attempts.excluded(10.0 + FIRST_RETRY_INTERVAL_S, as_last_resort=True) == set()


@pytest.mark.parametrize("failure", [HopLeaving("a server leaves"), InvalidRequest("field", "is wrong")])
def test_a_server_that_answers_is_not_asked_again(failure: CorollaError) -> None:
    attempts = Attempts(30.0)
    attempts.record([(HOP, failure)], 10.0)
    assert attempts.excluded(12.0, as_last_resort=True) == {"a"}
    assert attempts.num_refused == 1


def test_a_server_without_room_has_not_failed() -> None:
    attempts = Attempts(30.0)
    attempts.record([(HOP, OutOfPages("full"))], 10.0)
    assert attempts.too_full == {"a"}
    assert not any(hop.server_id in attempts.lost for hop in CHAIN.hops)
    assert attempts.excluded(12.0, as_last_resort=True) == {"a"}


def test_a_server_that_is_busy_is_asked_again() -> None:
    attempts = Attempts(30.0)
    attempts.record([(HOP, QueueFull("too many sessions"))], 10.0)
    assert attempts.excluded(10.0, as_last_resort=False) == set()
    assert attempts.num_refused == 0
