"""Counts the values of a body in JSON before it is parsed: a parsed value takes far more room than its text. Pure.

Two bytes of JSON can become a hundred bytes of memory and a microsecond of time in which no other Python code runs.
"""

from typing import Final

from corolla.chassis.errors import InvalidRequest

MAX_VALUES: Final = 1 << 18
"""The most values of a body, most of which are numbers if they are many: token ids."""
MAX_PARTS: Final = 1 << 16
"""The most texts, names, lists and objects of a body: each costs many times what a number costs."""


def check_values(data: bytes) -> None:
    """Refuses a body of very many values. Raises InvalidRequest.

    The count is exact up to the first fault in the JSON, where parsing ends.
    """
    num_openings = data.count(b"[") + data.count(b"{")
    num_quotes = data.count(b'"')
    num_values = data.count(b",") + num_openings
    if num_values + num_quotes <= MAX_PARTS:
        return
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        num_quotes = data.count(b'"')
    num_texts = num_quotes // 2
    if num_texts <= MAX_PARTS:
        outside = b"".join(data.split(b'"')[::2])
        num_openings = outside.count(b"[") + outside.count(b"{")
        num_values = outside.count(b",") + num_openings
    if num_texts + num_openings > MAX_PARTS:
        raise InvalidRequest("body", f"has more than {MAX_PARTS} texts, lists and objects")
    if num_values > MAX_VALUES:
        raise InvalidRequest("body", f"has more than {MAX_VALUES} values")
