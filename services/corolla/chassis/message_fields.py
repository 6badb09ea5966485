"""Counts the fields of a message before it is parsed: a parsed field takes far more room than its bytes. Pure.

The encoding is described at https://protobuf.dev/programming-guides/encoding.
"""

from enum import IntEnum
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor

from corolla.chassis.errors import MalformedMessage

_LEAST_BYTES: Final = 2
"""The bytes of the shortest field: its number, and its value or length."""


class _WireType(IntEnum):
    VARINT = 0
    EIGHT_BYTES = 1
    WITH_LENGTH = 2
    FOUR_BYTES = 5


def check_fields(data: bytes, descriptor: Descriptor, most: int) -> None:
    """Refuses a message with more than `most` fields, inner messages included. Raises MalformedMessage.

    A packed list is one field. The count is exact up to the first fault in the bytes, where parsing ends.
    """
    if len(data) <= most * _LEAST_BYTES:
        return
    try:
        num_fields = _count(data, descriptor, most)
    except IndexError:
        return
    if num_fields > most:
        raise MalformedMessage("request", f"has more than {most} fields")


def _count(data: bytes, descriptor: Descriptor, most: int) -> int:
    num_fields, parts = 0, [(0, len(data), descriptor)]
    while parts:
        place, end, descriptor = parts.pop()
        inner = _inner_messages(descriptor)
        while place < end and num_fields <= most:
            num_fields += 1
            key, place = _varint(data, place)
            match key & 7:
                case _WireType.VARINT:
                    _, place = _varint(data, place)
                case _WireType.EIGHT_BYTES:
                    place += 8
                case _WireType.WITH_LENGTH:
                    length, place = _varint(data, place)
                    if (found := inner.get(key >> 3)) is not None:
                        parts.append((place, min(place + length, end), found))
                    place += length
                case _WireType.FOUR_BYTES:
                    place += 4
    return num_fields


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError."""
    number = data[place]
    place += 1
    if number < 128:
        return number, place
    number, shift = number & 127, 7
    while (byte := data[place]) >= 128 and shift < 63:
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
    return number | byte << shift, place + 1


@cache
def _inner_messages(descriptor: Descriptor) -> dict[int, Descriptor]:
    """The messages within a message, by the numbers of their fields."""
    return {each.number: each.message_type for each in descriptor.fields if each.message_type is not None}
