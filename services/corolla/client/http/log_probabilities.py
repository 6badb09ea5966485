"""Log probabilities in OpenAI's two forms: that of chats, and the older one of completions. Pure."""

import codecs
from collections.abc import Sequence
from typing import Any

from corolla.v1 import generation_pb2 as pb


def logprob_facts(entries: Sequence[pb.TokenLogprob]) -> list[dict[str, Any]]:
    """The form of chats. `bytes` are each token's own; the chosen token is always among the alternatives."""
    return [{**_token_facts(entry), "top_logprobs": list(map(_token_facts, _top(entry)))} for entry in entries]


class CompletionLogprobsBuilder:
    """The form of completions, for the tokens of one text in their order, which may come in several parts."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

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
    return {
        "token": _escaped_bytes(entry) or entry.text,
        "logprob": entry.logprob,
        "bytes": list(_bytes(entry)),
    }
