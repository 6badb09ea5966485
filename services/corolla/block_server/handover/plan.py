"""Decides which part of a session is sent next. Pure."""

from dataclasses import dataclass, field
from typing import Final

MAX_REPEATS: Final = 8
"""A handover is given up after this many answers in a row without progress."""
MAX_LAST_TOKENS: Final = 16
"""A session in mid-answer waits for at most so many tokens to travel, unless it computes faster than they are sent."""

LEAST_TOKENS: Final = 16
"""A part for a standby waits for so many new tokens of a short text: a recovery replays these few in one step."""
_SHORT_TEXT_TOKENS: Final = 2048


def part_tokens(num_tokens: int, of_short_texts: int = LEAST_TOKENS) -> int:
    """Returns for how many new tokens of a text a part for its standby waits.

    A token that is replayed looks at the whole text. So in a text four times as long, a fourth of the tokens wait.
    """
    return max(1, of_short_texts * _SHORT_TEXT_TOKENS // max(num_tokens, _SHORT_TEXT_TOKENS))


@dataclass(slots=True)
class HandoverProgress:
    """How far the handover of one session to one receiver has come.

    Attributes:
        num_received: how many tokens the receiver has, once it has all parts that are under way.
        states_at: the position at which recurrent states were sent last to a standby.
    """

    num_received: int = 0
    states_at: int = 0
    _under_way: list[int] = field(default_factory=list)  # the first tokens of parts that are not answered
    _num_repeats: int = 0
    _has_caught_up: bool = False

    def begin(self, num_held: int) -> None:
        """Notes how many tokens the receiver holds as the handover begins, or goes on after its stream broke."""
        # Parts that were not answered may have replaced tokens that have changed. The receiver may still hold these.
        self.num_received = min([num_held, *self._under_way])
        self._under_way.clear()

    def next_part(
        self, num_held: int, num_unchanged: int, max_tokens: int, *, is_idle: bool = False
    ) -> tuple[int, int, bool]:
        """Returns the next part to send: its first token, its number of tokens, and whether it is the last part.

        A session waits while its last part travels. So a large part is not the last one, though nothing follows it: the
        session goes on meanwhile, and one more part has what it has computed.

        Args:
            num_held: how many tokens the session has here; it may have grown or been truncated since the last part.
            num_unchanged: how many of its first tokens have not changed since they were sent.
            max_tokens: the most tokens of a part.
            is_idle: whether the session computes nothing now.
        """
        start = min(self.num_received, num_unchanged, num_held)
        self.states_at = min(self.states_at, start)
        num_tokens = min(max_tokens, num_held - start)
        is_last = start + num_tokens == num_held
        if is_last and num_tokens > MAX_LAST_TOKENS and not is_idle and not self._has_caught_up:
            is_last, self._has_caught_up = False, True
        self.num_received = start + num_tokens
        self._under_way.append(start)
        return start, num_tokens, is_last

    def answered(self, num_held: int, *, taken: bool) -> bool:
        """Notes how many tokens the receiver holds after the first part that was under way.

        If it has not taken the part, the parts after it do not count either.

        Returns:
            False if the handover should be given up.
        """
        if taken:
            del self._under_way[0]
            self._num_repeats = 0
        else:
            self.begin(num_held)
            self._num_repeats += 1
        return self._num_repeats < MAX_REPEATS
