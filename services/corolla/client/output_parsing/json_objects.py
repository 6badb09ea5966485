"""Follows a JSON object while its text arrives. Pure."""

import re
from enum import Enum, auto
from typing import Final

_OUTSIDE: Final = re.compile(r"[\s:,0-9+\-.eEtrufalsn]*")
"""The characters of JSON between brackets and strings. Numbers and words are not checked further."""
_INSIDE: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_CLOSES: Final = {"{": "}", "[": "]"}


class Reading(Enum):
    """The result of a read: OPEN needs more text, CLOSED has reached the wanted depth, BROKEN is not JSON."""

    OPEN = auto()
    CLOSED = auto()
    BROKEN = auto()


class ObjectScanner:
    """Reads one object, beginning with its first brace."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._is_in_string = False

    def read(self, text: str, start: int, depth: int = 0) -> tuple[int, Reading]:
        """Reads until only `depth` brackets are open. Returns the position at which it stopped, and the result.

        A lone backslash at the text's end stays unread; the caller passes it again with more text.
        """
        position = start
        while position < len(text):
            if self._is_in_string:
                position = self._end_of(_INSIDE, text, position)
                if position == len(text) or text[position] == "\\":
                    return position, Reading.OPEN
                self._is_in_string = False
                position += 1
                continue
            position = self._end_of(_OUTSIDE, text, position)
            if position == len(text):
                break
            if not self._takes(text[position]):
                return position, Reading.BROKEN
            position += 1
            if len(self._closing) <= depth and not self._is_in_string:
                return position, Reading.CLOSED
        return position, Reading.OPEN

    def _end_of(self, pattern: re.Pattern[str], text: str, position: int) -> int:
        found = pattern.match(text, position)
        return position if found is None else found.end()

    def _takes(self, mark: str) -> bool:
        """Follows a bracket or a quotation mark. Returns whether it may stand here."""
        if mark in _CLOSES:
            self._closing.append(_CLOSES[mark])
        elif self._closing and mark == self._closing[-1]:
            self._closing.pop()
        elif mark == '"' and self._closing:
            self._is_in_string = True
        else:
            return False
        return True
