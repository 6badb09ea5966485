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
        """Returns one bit for each token id, the least significant first: whether the token may come next.

        Any thread may call this, but no two at the same time. The call may take milliseconds and releases the GIL
        meanwhile. A second call returns the same bits at no cost.

        Raises:
            InvalidRequest: the computation exceeded the limits that `grammar_text` sets.
        """
        if self._allowed is None:
            allowed = self._matcher.compute_bitmask()
            # A matcher that has failed allows only end tokens.
            if self._matcher.is_error():
                raise InvalidRequest("response_format", "became too complex in the middle of the answer")
            self._allowed = allowed
        return self._allowed

    def add(self, token_id: int) -> None:
        """Advances the grammar by the answer's next token, which must be allowed."""
        self._allowed = None
        self._matcher.consume_token(token_id)

    def add_all(self, token_ids: Sequence[int]) -> bool:
        """Advances the grammar by several tokens. Returns False if it bars one; the grammar is unusable then."""
        self._allowed = None
        return not token_ids or self._matcher.consume_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """The tokens that usually spell the text that must follow, if any; other tokens may spell that text, too."""
        return self._matcher.compute_ff_tokens()

    def possible(self, token_ids: Sequence[int]) -> list[int]:
        """The longest beginning of these tokens that the grammar allows."""
        return list(token_ids[: self._matcher.validate_tokens(list(token_ids))])

    def fork(self) -> "AnswerGrammar":
        """A copy in the same state. Tokens that are added to one do not change the other."""
        return AnswerGrammar(self._matcher.deep_copy())
