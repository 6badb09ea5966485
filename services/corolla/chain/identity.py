"""The identity of a session on every hop: its id, epoch and tenant."""

from dataclasses import dataclass, replace
from typing import Final, Self

from corolla.chassis.errors import HopUnavailable

_MAX_EPOCH: Final = 2**32 - 1

EPOCHS_PER_TURN: Final = 256
"""How many epochs a turn has: one that it begins with, and one for each time that it opens its hops again."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Identifies a session on a hop. Epochs beyond `last_epoch` belong to the conversation's next turn."""

    session_id: bytes
    epoch: int
    tenant: str
    last_epoch: int = _MAX_EPOCH

    @classmethod
    def of_turn(cls, session_id: str, turn_epoch: int, tenant: str) -> Self:
        """A conversation's identity at the beginning of a turn; no other turn has the same `turn_epoch`."""
        first_epoch = turn_epoch * EPOCHS_PER_TURN
        return cls(bytes.fromhex(session_id), first_epoch, tenant, first_epoch + EPOCHS_PER_TURN - 1)

    def in_next_epoch(self) -> Self:
        """The same session in its next epoch.

        Raises HopUnavailable if the turn has no epoch left. The turn then fails; the next one has epochs of its own.
        """
        if self.epoch >= self.last_epoch:
            raise HopUnavailable("the block servers of this turn changed too often")
        return replace(self, epoch=self.epoch + 1)

    def at_end_of_turn(self) -> Self:
        """The same session in the last epoch of its turn, which is not lower than that of any open of this turn."""
        return replace(self, epoch=self.last_epoch)
