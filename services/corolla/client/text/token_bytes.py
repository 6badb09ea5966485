"""The bytes of single tokens, which may be a part of a character. Pure."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_BEGINNING: Final = "\u2581"


def from_byte_level(token: str) -> bytes | None:
    """The bytes that a token spells by GPT-2's alphabet; None if it has another character."""
    alphabet = _alphabet()
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return None


def from_sentence_piece(token: str) -> bytes:
    """The bytes of a token such as `<0xE2>`, or of a text whose words begin with a special character."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_WORD_BEGINNING, " ").encode()


def decodes_by(decoder: Mapping[str, Any] | None, kind: str) -> bool:
    """The description of a tokenizer's decoder has a part of this kind."""
    if decoder is None:
        return False
    return decoder.get("type") == kind or any(decodes_by(each, kind) for each in decoder.get("decoders", ()))


@cache
def _alphabet() -> Mapping[str, int]:
    """GPT-2's characters for all bytes: printable ones stand for themselves, others for characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(0x100) if each not in plain]
    return {
        **{chr(each): each for each in plain},
        **{chr(0x100 + index): each for index, each in enumerate(others)},
    }
