"""Who a session is on every hop."""

from dataclasses import dataclass, replace
from typing import Final, Self

from corolla.chassis.errors import HopUnavailable

_MAX_EPOCH: Final = 2**32 - 1

EPOCHS_PER_TURN: Final = 256
"""A turn's own epochs: the one it begins with, and one for each time that it opens its hops again."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """What a hop knows a session by. Epochs beyond `last_epoch` belong to the conversation's next turn."""

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

        Raises HopUnavailable where the turn has none left: it ends, and the caller's next one has epochs of its own.
        """
        if self.epoch >= self.last_epoch:
            raise HopUnavailable("the servers of this turn changed too often")
        return replace(self, epoch=self.epoch + 1)

    def at_end_of_turn(self) -> Self:
        """In an epoch that no opening of this turn has exceeded."""
        return replace(self, epoch=self.last_epoch)
