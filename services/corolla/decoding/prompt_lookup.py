"""Drafts the next tokens from the text so far: what followed the last time that it ran like this. Pure.

Answers that quote, rewrite or correct their prompt repeat long stretches of it; there such draft tokens are mostly
right. Described as prompt lookup decoding by Apoorv Saxena (2023); `transformers` has it as `prompt_lookup_num_tokens`.
"""

from collections.abc import Iterable
from typing import Final

_INDEXED_AT_A_TIME: Final = 4096
_MATCH_LENGTHS: Final = (8, 5, 3, 2)

LOOKUP_RATES: Final[tuple[float, ...]] = (0.9, 0.8, 0.6, 0.4)
"""How often a draft token is right before anything is known of a text, for each kind of evidence."""


class PromptLookup:
    """A drafter: the tokens of one prompt and answer, indexed chunk by chunk.

    Each further token costs the same, however long the text is: for each match length one entry says what followed the
    latest occurrence of those tokens.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._followers: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _MATCH_LENGTHS)
        self._unread: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the next tokens of the text."""
        self._unread.extend(token_ids)

    @property
    def is_behind(self) -> bool:
        """Whether some of them are not indexed yet."""
        return bool(self._unread)

    def read_chunk(self) -> None:
        """Indexes some of them."""
        text = self._token_ids
        for token_id in self._unread[:_INDEXED_AT_A_TIME]:
            end = len(text)
            # What ends here is indexed once its follower is known; so the text's own end never finds itself.
            for length, followers in zip(_MATCH_LENGTHS, self._followers, strict=True):
                if end >= length:
                    followers[tuple(text[end - length : end])] = end
            text.append(token_id)
        del self._unread[:_INDEXED_AT_A_TIME]

    @property
    def num_indexed(self) -> tuple[int, ...]:
        """Entries of the index, which is what it costs in memory: for each match length, longest first."""
        return tuple(map(len, self._followers))

    @property
    def evidence(self) -> int | None:
        """The kind of match, 0 for the longest; None where the text's end has not occurred before."""
        match = self._match()
        return None if match is None else match[0]

    def draft(self, num_tokens: int, sampler: object) -> list[int]:
        """What followed the latest occurrence of the longest match; empty where there is none.

        Where that runs into the text's end, the draft continues with itself: it follows a text that goes in circles
        around. The sampler makes no difference.
        """
        match = self._match()
        if match is None:
            return []
        start = match[1]
        drafted: list[int] = []
        num_before = len(self._token_ids)
        for index in range(start, start + num_tokens):
            drafted.append(self._token_ids[index] if index < num_before else drafted[index - num_before])
        return drafted

    def _match(self) -> tuple[int, int] | None:
        text = self._token_ids
        for kind, (length, followers) in enumerate(zip(_MATCH_LENGTHS, self._followers, strict=True)):
            start = followers.get(tuple(text[-length:]))
            if start is not None:
                return kind, start
        return None
