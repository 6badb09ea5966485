"""The grammar of an answer: it says which tokens may come next, and follows the tokens that are chosen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from corolla.chassis.errors import InvalidRequest

if TYPE_CHECKING:
    # Sampling without grammars does not need llguidance.
    from llguidance import LLMatcher


class AnswerGrammar:
    """Says which tokens may come next in one answer.

    Args:
        matcher: the matcher of this answer; no other answer uses it.
    """

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._allowed: bytes | None = None

    def allowed(self) -> bytes:
        """Says for each token id whether it may come next: one bit each, the least significant bit first.

        Any thread may call this, but no two at the same time. It may take milliseconds, without the interpreter's lock.
        A second call returns the same bits at no cost.

        Raises:
            InvalidRequest: the computation exceeded the limits of grammars.
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
        """Takes note of the next tokens. Returns False if the grammar does not allow them; it is unusable then."""
        self._allowed = None
        return not token_ids or self._matcher.consume_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """The usual tokens of the text that must follow, if any; other tokens may spell it, too."""
        return self._matcher.compute_ff_tokens()

    def possible(self, token_ids: Sequence[int]) -> list[int]:
        """The longest beginning of these tokens that the grammar allows."""
        return list(token_ids[: self._matcher.validate_tokens(list(token_ids))])

    def fork(self) -> "AnswerGrammar":
        """A copy in the same state. Tokens that are added to one do not change the other."""
        return AnswerGrammar(self._matcher.deep_copy())
