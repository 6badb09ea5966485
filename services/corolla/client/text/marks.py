"""Marks that stand in for texts which spell special tokens while a template renders, so that these stay plain text."""

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, Final

_MARK: Final = "\U000f0002"
"""A character of private use, to which templates give no meaning."""
_NUM_NONCE_PARTS: Final = 4
_NONCE_PART_DIGITS: Final = 20
"""The length of one part of a nonce. If a template cuts a mark, at least one part stays whole, and shows the cut.

The parts have only digits, because a template may change letters.
"""
_ESCAPES: Final = {0: 0, 1: 1, 3: 2}
"""Maps the number of backslashes before a quotation mark to how often the text was encoded as a JSON string."""


class Marks:
    """The marks of one rendering.

    Args:
        special_range: returns the start of the first and the end of the last special token in a text, or None.
    """

    def __init__(self, special_range: Callable[[str], tuple[int, int] | None]) -> None:
        self._special_range = special_range
        self._parts = [
            f"{secrets.randbelow(10**_NONCE_PART_DIGITS):0{_NONCE_PART_DIGITS}}" for _ in range(_NUM_NONCE_PARTS)
        ]
        self._nonce = "".join(self._parts)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        """Whether any text has been marked."""
        return bool(self._texts)

    def marked(self, value: Any) -> Any:
        """A copy of a JSON value. In each text, a mark replaces the part from the first to the last special token."""
        match value:
            case str():
                return self._marked_text(value)
            case list() | tuple():
                return [self.marked(each) for each in value]
            case dict():
                return {self._marked_text(key): self.marked(each) for key, each in value.items()}
        return value

    def _marked_text(self, text: str) -> str:
        if (found := self._special_range(text)) is None:
            return text
        start, end = found
        # The quotation mark shows whether the template encodes the text as JSON.
        mark = f'{_MARK}{self._nonce}{len(self._texts)}"{_MARK}'
        self._texts.append(text[start:end])
        return text[:start] + mark + text[end:]

    def split(self, rendering: str) -> list[str] | None:
        """Splits a rendering of marked values: the template's text, a marked text, the template's text, and so on.

        Returns None if the template has cut or changed a mark.
        """
        parts = re.split(rf'{_MARK}{self._nonce}([0-9]+)(\\*)"{_MARK}', rendering)
        template_texts, numbers, backslashes = parts[::3], parts[1::3], parts[2::3]
        if any(nonce_part in text for text in template_texts for nonce_part in self._parts):
            return None
        texts = template_texts[:1]
        for number, slashes, following in zip(numbers, backslashes, template_texts[1:], strict=True):
            if len(slashes) not in _ESCAPES:
                return None
            plain = self._texts[int(number)]
            for _ in range(_ESCAPES[len(slashes)]):
                plain = json.dumps(plain, ensure_ascii=False)[1:-1]
            texts += [plain, following]
        return texts
