"""What a chat knows between its turns; no socket here, so that both kinds of chat share it."""

from collections.abc import Sequence
from typing import Final

from corolla.sdk.answer import Answer
from corolla.sdk.messages import AnyMessage
from corolla.sdk.results import Message, SessionInfo, Usage

Turn = str | Sequence[AnyMessage]
"""What a user says, or messages: of tools, for example, that the model has called."""

SETTLE_S: Final = 10.0
"""How long a chat waits for the service to wind up a turn that was left early, in seconds."""
SETTLE_INTERVAL_S: Final = 0.05


class Conversation:
    """Which messages a turn must send: the system message goes with the first turn that the session keeps."""

    def __init__(self, system: str | None, *, resumed: bool) -> None:
        self._system = system
        self._num_turns = 1 if resumed else 0
        self._turn: Answer | None = None
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        """Of the last turn that came to its end."""
        return (self._turn.usage if self._turn else None) or self._usage

    @property
    def is_settled(self) -> bool:
        """False when the last turn did not come to its end: only the service knows what the session holds then."""
        return self._turn is None or self._turn.usage is not None

    def messages(self, turn: Turn) -> list[AnyMessage]:
        """The messages of the next turn."""
        system = [Message("system", self._system)] if self._system and not self._num_turns else []
        return [*system, *([Message("user", turn)] if isinstance(turn, str) else turn)]

    def begin(self, turn: Answer | None = None) -> None:
        """A turn is asked for: as a stream, or at once. Until `end`, it is not settled."""
        self._turn = turn or Answer()

    def end(self, usage: Usage | None = None) -> None:
        """Counts the last turn, once it is settled."""
        ended = usage or (self._turn.usage if self._turn else None)
        if ended is not None:
            self._usage = ended
            self._num_turns += 1
        self._turn = None

    def settle(self, info: SessionInfo) -> None:
        """Takes the service's word for how many turns the session holds."""
        self._num_turns = info.num_turns
        self._turn = None
