import pytest

from corolla.chassis.errors import CorollaError, HopLeaving, HopUnavailable, InvalidRequest, OutOfPages
from corolla.client.chain.attempts import Attempts
from corolla.v1 import common_pb2

HOP = common_pb2.Hop(server_id="a")
CHAIN = common_pb2.Chain(hops=[common_pb2.Hop(server_id="b"), HOP])


def lost() -> HopUnavailable:
    return HopUnavailable("a hop of the chain was lost")


def test_a_connection_that_breaks_at_once_has_a_second_attempt_and_no_third() -> None:
    attempts = Attempts()
    assert not attempts.is_second(CHAIN)
    attempts.note([(HOP, lost())], 0.01)
    assert attempts.is_second(CHAIN)
    assert attempts.failed == set()
    attempts.note([(HOP, lost())], 0.01)
    assert not attempts.is_second(CHAIN)
    assert attempts.failed == {"a"}


def test_what_many_sessions_learn_in_one_attempt_counts_once() -> None:
    attempts = Attempts()
    attempts.note([(HOP, lost()), (HOP, lost()), (HOP, lost())], 0.01)
    assert attempts.is_second(CHAIN)
    assert attempts.failed == set()


def test_a_silent_server_is_not_waited_for_again() -> None:
    attempts = Attempts()
    attempts.note([(HOP, lost())], 3.0)
    assert not attempts.is_second(CHAIN)
    assert attempts.failed == {"a"}


@pytest.mark.parametrize("failure", [HopLeaving("a server leaves"), InvalidRequest("field", "is wrong")])
def test_a_server_that_answers_is_not_asked_again(failure: CorollaError) -> None:
    attempts = Attempts()
    attempts.note([(HOP, failure)], 0.01)
    assert not attempts.is_second(CHAIN)
    assert attempts.failed == {"a"}


def test_a_server_without_room_has_not_failed() -> None:
    attempts = Attempts()
    attempts.note([(HOP, OutOfPages("full"))], 0.01)
    assert attempts.too_full == {"a"}
    assert attempts.failed == set()
