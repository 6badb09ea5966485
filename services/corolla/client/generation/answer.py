"""An answer as it grows: tokens in, text and the end out. Pure: time is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass

from corolla.client.generation.sampling import SampledToken
from corolla.client.generation.stopping import FinishReason, StopDecider, StopMatcher
from corolla.client.text.detokenizer import Detokenizer
from corolla.client.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to an answer.

    Attributes:
        token: the token.
        text: whole characters that can no longer become part of a stop sequence.
        finish_reason: set on the last one.
    """

    token: SampledToken
    text: str
    finish_reason: FinishReason | None


class Answer:
    """One answer."""

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], decider: StopDecider, stop_sequences: Sequence[str]
    ) -> None:
        self.token_ids: list[int] = []
        self._parts: list[str] = []
        self._decider = decider
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stop_sequences)

    @property
    def num_tokens_left(self) -> int:
        """How many more it may have."""
        return self._decider.max_new_tokens - len(self.token_ids)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    def push(self, token: SampledToken, elapsed_s: float) -> Delta:
        """Takes the next token.

        Args:
            token: as sampled.
            elapsed_s: seconds since the request began.
        """
        self.token_ids.append(token.token_id)
        finish_reason = self._decider.finish_reason(token.token_id, len(self.token_ids), elapsed_s)
        new_text = self._detokenizer.push(token.token_id)
        if finish_reason is not None:
            new_text += self._detokenizer.flush()
        text, matched = self._matcher.push(new_text)
        if matched:
            finish_reason = FinishReason.STOP_SEQUENCE
        elif finish_reason is not None:
            text += self._matcher.flush()
        self._parts.append(text)
        return Delta(token, text, finish_reason)
