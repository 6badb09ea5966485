"""Decides when an answer ends. Pure: time is passed in, nothing here waits, reads a clock or holds a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended. The values are labels of metrics and of the command line's JSON."""

    EOS = "eos"
    LENGTH = "length"
    STOP_SEQUENCE = "stop_sequence"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class StopDecider:
    """Decides after each token whether the answer ends with it.

    Args:
        max_new_tokens: the most tokens of the answer, at least 1.
        eos_token_ids: the tokens with which the model itself ends an answer.
        ignore_eos: whether the answer continues after those tokens.
        time_limit_s: seconds that the answer may take; None for no limit.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    time_limit_s: float | None = None

    def finish_reason(self, token_id: int, num_generated_tokens: int, elapsed_s: float = 0.0) -> FinishReason | None:
        """Why the answer ends with `token_id`, the last of its `num_generated_tokens`; None if the answer continues.

        If several reasons hold at once, the model's own end comes before the length, and the length before the time.
        """
        if token_id in self.eos_token_ids and not self.ignore_eos:
            return FinishReason.EOS
        if num_generated_tokens >= self.max_new_tokens:
            return FinishReason.LENGTH
        if self.time_limit_s is not None and elapsed_s >= self.time_limit_s:
            return FinishReason.TIME_LIMIT
        return None


class StopMatcher:
    """Looks for stop sequences in a text that arrives in pieces, and holds back text that may be the beginning of one.

    The match that is complete first wins; of matches that are complete at the same character, the longest wins. So the
    result does not depend on how the text was cut into pieces.

    Args:
        stop_sequences: the stop sequences, which must not be empty.

    Attributes:
        matched: the stop sequence that is complete; empty: none is.
    """

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._sequences = tuple(dict.fromkeys(stop_sequences))
        self._max_held_chars = max((len(sequence) for sequence in self._sequences), default=1) - 1
        self._held = ""
        self.matched = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns the text that may be sent, and whether a stop sequence is complete.

        On a match the returned text ends where the stop sequence begins; whatever is pushed later is dropped.
        """
        if self.matched:
            return "", True
        text = self._held + text
        found = self._match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start], True
        held_start = self._held_start(text)
        self._held = text[held_start:]
        return text[:held_start], False

    def flush(self) -> str:
        """Returns the text that was held back, for an answer that ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(sequence), sequence) for sequence in self._sequences)
        ends = [(start + len(sequence), start, sequence) for start, sequence in starts if start >= 0]
        return min(ends)[1:] if ends else None

    def _held_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._max_held_chars), len(text)):
            rest = text[start:]
            if any(sequence.startswith(rest) for sequence in self._sequences):
                return start
        return len(text)
