"""Log probabilities in OpenAI's two forms: that of chats, and the older one of completions."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Self

from corolla.client.api.replies import PIECE_TOKENS
from corolla.http.answers import compact, list_texts
from corolla.v1 import generation_pb2 as pb


def logprob_facts(entries: Sequence[pb.TokenLogprob]) -> list[dict[str, Any]]:
    """The form of chats. `bytes` are each token's own; the chosen token is always among the alternatives."""
    return [{**_token_facts(entry), "top_logprobs": list(map(_token_facts, _top(entry)))} for entry in entries]


def logprob_texts(entries: Sequence[pb.TokenLogprob]) -> AsyncGenerator[str, None]:
    """The form of chats in JSON, without the brackets of the list, in pieces between which other tasks run."""
    return list_texts(entries, PIECE_TOKENS, logprob_facts)


class CompletionLogprobs:
    """The form of completions, for the tokens of one text in their order, which may come in several parts.

    The JSON of long parts is made in pieces, between which other tasks run.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._parts: dict[str, list[str]] = {}

    def facts(self, entries: Sequence[pb.TokenLogprob], first: pb.TokenLogprob | None = None) -> dict[str, Any]:
        """The facts of the next tokens.

        Args:
            first: a token before them that nothing precedes, so that it has no log probability.
        """
        all_entries = entries if first is None else (first, *entries)
        num_unknown = len(all_entries) - len(entries)
        return {
            "tokens": [_legacy_name(entry) for entry in all_entries],
            "token_logprobs": [*[None] * num_unknown, *(entry.logprob for entry in entries)],
            "top_logprobs": [*[None] * num_unknown, *map(_legacy_top, entries)],
            "text_offset": [self._advance(entry) for entry in all_entries],
        }

    async def add(self, entries: Sequence[pb.TokenLogprob], first: pb.TokenLogprob | None = None) -> None:
        """Adds the facts of the next tokens to the JSON."""
        for start in range(0, max(1, len(entries)), PIECE_TOKENS):
            facts = self.facts(entries[start : start + PIECE_TOKENS], None if start else first)
            for name, values in facts.items():
                self._parts.setdefault(name, []).extend([compact(values)[1:-1]] if values else [])
            await asyncio.sleep(0)

    def copy(self) -> Self:
        """The same for a text that begins as this one. The two share what they have in common."""
        copy = type(self)()
        copy._offset = self._offset
        copy._decoder.setstate(self._decoder.getstate())
        copy._parts = {name: [*parts] for name, parts in self._parts.items()}
        return copy

    def pieces(self) -> Iterator[str]:
        """The pieces of the JSON of all tokens that were added."""
        for number, (name, parts) in enumerate(self._parts.items()):
            yield f'{"," if number else "{"}"{name}":['
            for place, part in enumerate(parts):
                yield f",{part}" if place else part
            yield "]"
        yield "}"

    def _advance(self, entry: pb.TokenLogprob) -> int:
        """Counts the characters before the token; a character of several tokens counts with the last of them."""
        offset = self._offset
        self._offset += len(self._decoder.decode(_bytes(entry)))
        return offset


def _top(entry: pb.TokenLogprob) -> Sequence[pb.TokenLogprob]:
    """The most probable tokens, and the chosen one behind them if it is another one."""
    if not entry.top or any(each.token_id == entry.token_id for each in entry.top):
        return entry.top
    return (*entry.top, entry)


def _legacy_top(entry: pb.TokenLogprob) -> dict[str, float]:
    """Alternatives by their texts; the second of two that read alike is named by its id."""
    found: dict[str, float] = {}
    for each in _top(entry) or (entry,):
        name = _legacy_name(each)
        found[f"token_id:{each.token_id}" if name in found else name] = each.logprob
    return found


def _bytes(entry: pb.TokenLogprob) -> bytes:
    return entry.bytes or entry.text.encode()


def _escaped_bytes(entry: pb.TokenLogprob) -> str:
    """The bytes of a token that is only a part of a character, as OpenAI writes them; empty for other tokens."""
    own = _bytes(entry)
    try:
        own.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{each:02x}" for each in own)
    return ""


def _legacy_name(entry: pb.TokenLogprob) -> str:
    return f"bytes:{escaped}" if (escaped := _escaped_bytes(entry)) else entry.text


def _token_facts(entry: pb.TokenLogprob) -> dict[str, Any]:
    return {"token": _escaped_bytes(entry) or entry.text, "logprob": entry.logprob, "bytes": list(_bytes(entry))}
