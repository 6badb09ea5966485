"""Marks that stand in a rendering for texts which spell special tokens, so that these stay plain text."""

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, Final

_MARK: Final = "\U000f0002"
"""Of private use, so that no template knows it."""
_NUM_NONCE_PARTS: Final = 4
_NONCE_PART_DIGITS: Final = 20
"""Of a mark that a template cuts one part at least is left; digits, because a template may change letters."""
_ESCAPES: Final = {0: 0, 1: 1, 3: 2}
"""How many backslashes stand before a quotation mark, to how often the text was made a string of JSON."""


class Marks:
    """The marks of one rendering.

    Args:
        special_range: from the first special token that a text spells to behind the last one; None where there is none.
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
        """The value of JSON with marks in place of what lies from the first special token of a text to its last one."""
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
        # The quotation mark shows whether the template makes JSON of the text.
        mark = f'{_MARK}{self._nonce}{len(self._texts)}"{_MARK}'
        self._texts.append(text[start:end])
        return text[:start] + mark + text[end:]

    def split(self, rendering: str) -> list[str] | None:
        """A rendering of marked values: the template's text, a marked one, the template's text, and so on.

        None where the template has cut or changed a mark.
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
