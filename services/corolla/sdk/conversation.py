"""The state of a chat between its turns. It uses no socket, so blocking and asyncio chats share the code."""

from collections.abc import Sequence
from typing import Final

from corolla.sdk.answer import Answer
from corolla.sdk.messages import AnyMessage
from corolla.sdk.results import Message, SessionInfo, Usage

Turn = str | Sequence[AnyMessage]
"""A user's text, or messages, for example the results of tools that the model has called."""

SETTLE_S: Final = 10.0
"""How long a chat waits for the service to end a turn that was left early, in seconds."""
SETTLE_INTERVAL_S: Final = 0.05


class Conversation:
    """Chooses the messages that a turn sends: the system message goes with the first turn that the session keeps."""

    def __init__(self, system: str | None, *, resumed: bool) -> None:
        self._system = system
        self._num_turns = 1 if resumed else 0
        self._turn: Answer | None = None
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        """The usage of the last completed turn; None before it."""
        return (self._turn.usage if self._turn else None) or self._usage

    @property
    def is_settled(self) -> bool:
        """The last turn was completed. If not, only the service knows what the session holds."""
        return self._turn is None or self._turn.usage is not None

    def messages(self, turn: Turn) -> list[AnyMessage]:
        """Returns the messages that the next turn sends."""
        system = [Message("system", self._system)] if self._system and not self._num_turns else []
        return [*system, *([Message("user", turn)] if isinstance(turn, str) else turn)]

    def begin(self, turn: Answer | None = None) -> None:
        """Records that a turn was requested; it is unsettled until `end`. `turn` is its stream, if any."""
        self._turn = turn or Answer()

    def end(self, usage: Usage | None = None) -> None:
        """Counts the last turn if it was completed."""
        ended = usage or (self._turn.usage if self._turn else None)
        if ended is not None:
            self._usage = ended
            self._num_turns += 1
        self._turn = None

    def settle(self, info: SessionInfo) -> None:
        """Takes the number of the session's turns from the service."""
        self._num_turns = info.num_turns
        self._turn = None
