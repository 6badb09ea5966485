"""What an answer must be, followed token by token as it is chosen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from corolla.chassis.errors import InvalidRequest

if TYPE_CHECKING:
    # Who samples without grammars needs no llguidance.
    from llguidance import LLMatcher


class AnswerGrammar:
    """Which tokens may follow those of one answer.

    Args:
        matcher: of this answer only.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._allowed: bytes | None = None

    def allowed(self) -> bytes:
        """One bit for each token id, the least significant one first: whether it may come next.

        In whichever thread, while nobody else uses this grammar; it may take milliseconds, without the interpreter's
        lock. The second call costs nothing.

        Raises:
            InvalidRequest: nobody can say within the limits.
        """
        if self._allowed is None:
            allowed = self._matcher.compute_bitmask()
            # A matcher that has failed allows the end, and nothing else.
            if self._matcher.is_error():
                raise InvalidRequest("response_format", "became too complex in the middle of the answer")
            self._allowed = allowed
        return self._allowed

    def add(self, token_id: int) -> None:
        """Takes note of the answer's next token, one of those that are allowed."""
        self._allowed = None
        self._matcher.consume_token(token_id)

    def add_all(self, token_ids: Sequence[int]) -> bool:
        """Whether these may be the next tokens, of which it takes note; if not, it is of no use any more."""
        self._allowed = None
        return not token_ids or self._matcher.consume_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """How the text that must follow, if any must, is usually written in tokens; other tokens may write it, too."""
        return self._matcher.compute_ff_tokens()

    def possible(self, token_ids: Sequence[int]) -> list[int]:
        """The first of these, as many as may come one behind the other."""
        return list(token_ids[: self._matcher.validate_tokens(list(token_ids))])

    def fork(self) -> "AnswerGrammar":
        """The same as it stands; neither notices what is added to the other."""
        return AnswerGrammar(self._matcher.deep_copy())
