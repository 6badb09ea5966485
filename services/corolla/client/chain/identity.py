"""Who a session is on every hop."""

from dataclasses import dataclass, replace
from typing import Final, Self

EPOCHS_PER_TURN: Final = 256
"""A turn's own epochs: the one it begins with, and one for each time that it opens its hops again."""


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """What a hop knows a session by."""

    session_id: bytes
    epoch: int
    tenant: str

    @classmethod
    def of_turn(cls, session_id: str, turn_epoch: int, tenant: str) -> Self:
        """A conversation's at the beginning of a turn.

        Args:
            session_id: hexadecimal.
            turn_epoch: drawn from the store; no other turn has the same.
        """
        return cls(bytes.fromhex(session_id), turn_epoch * EPOCHS_PER_TURN, tenant)

    def reopened(self) -> Self:
        """The same session in its next epoch."""
        return replace(self, epoch=self.epoch + 1)

    def at_end_of_turn(self) -> Self:
        """In an epoch that no opening of this turn has exceeded."""
        return replace(self, epoch=self.epoch - self.epoch % EPOCHS_PER_TURN + EPOCHS_PER_TURN - 1)
