"""A turn has 256 epochs, and none of those that belong to the next turn."""

import pytest

from corolla.chain.identity import EPOCHS_PER_TURN, SessionIdentity
from corolla.chassis.errors import HopUnavailable

SESSION_ID = bytes(16).hex()


def test_a_turn_that_has_used_its_epochs_ends_before_it_takes_those_of_the_next_turn() -> None:
    identity = SessionIdentity.of_turn(SESSION_ID, 7, "t")
    epochs = [identity.epoch]
    for _ in range(EPOCHS_PER_TURN - 1):
        identity = identity.in_next_epoch()
        epochs.append(identity.epoch)
    assert epochs == list(range(7 * EPOCHS_PER_TURN, 8 * EPOCHS_PER_TURN))
    with pytest.raises(HopUnavailable) as ended:
        identity.in_next_epoch()
    assert ended.value.retry_after_s is not None, "the next turn has epochs of its own"
    assert SessionIdentity.of_turn(SESSION_ID, 8, "t").epoch == identity.epoch + 1


def test_the_end_of_a_turn_is_no_earlier_than_its_last_opening() -> None:
    identity = SessionIdentity.of_turn(SESSION_ID, 7, "t")
    assert identity.at_end_of_turn().epoch == identity.in_next_epoch().at_end_of_turn().epoch == 8 * EPOCHS_PER_TURN - 1


def test_a_session_without_turns_is_reopened_as_often_as_it_must_be() -> None:
    identity = SessionIdentity(bytes(16), 1, "t")
    for _ in range(3 * EPOCHS_PER_TURN):
        identity = identity.in_next_epoch()
    assert identity.epoch == 3 * EPOCHS_PER_TURN + 1
