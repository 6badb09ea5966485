"""Drafts the next tokens from the text so far: the tokens that followed the last occurrence of its newest tokens. Pure.

Answers that quote, rewrite or correct their prompt repeat long parts of it; there, such draft tokens are mostly right.
This is prompt lookup decoding (Apoorv Saxena, 2023); `transformers` has it as `prompt_lookup_num_tokens`.
"""

from collections.abc import Iterable
from typing import Final

_INDEXED_AT_A_TIME: Final = 4096
_MATCH_LENGTHS: Final = (8, 5, 3, 2)

LOOKUP_RATES: Final[tuple[float, ...]] = (0.9, 0.8, 0.6, 0.4)
"""The expected share of right draft tokens for each of `_MATCH_LENGTHS`, before any draft token was checked."""


class PromptLookup:
    """Drafts from the tokens of one prompt and its answer, which it indexes chunk by chunk.

    The time to index a token does not depend on the text's length: a token makes one entry for each match length. An
    entry maps that many tokens to the position after their latest occurrence.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._followers: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _MATCH_LENGTHS)
        self._unread: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the next tokens of the text."""
        self._unread.extend(token_ids)

    def catch_up(self) -> bool:
        """Indexes the next chunk of the text. Returns whether all of the text is indexed."""
        text = self._token_ids
        for token_id in self._unread[:_INDEXED_AT_A_TIME]:
            end = len(text)
            # Tokens are indexed when the next token is known, so a lookup of the text's end never finds that very end.
            for length, followers in zip(_MATCH_LENGTHS, self._followers, strict=True):
                if end >= length:
                    followers[tuple(text[end - length : end])] = end
            text.append(token_id)
        del self._unread[:_INDEXED_AT_A_TIME]
        return not self._unread

    @property
    def num_indexed(self) -> tuple[int, ...]:
        """The number of index entries for each match length, longest first; memory grows with them."""
        return tuple(map(len, self._followers))

    @property
    def evidence(self) -> int | None:
        """The index in `_MATCH_LENGTHS` of the longest match; None if the text's end has not occurred before."""
        match = self._match()
        return None if match is None else match[0]

    def draft(self, num_tokens: int, sampler: object) -> list[int]:
        """The tokens that followed the latest occurrence of the longest match; empty where nothing matches.

        A draft that reaches the text's end continues with its own first tokens, as a text that repeats itself does.
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
