"""Writes a caller's values into fields of a request. Errors name a value by the caller's name for it."""

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from corolla.chassis.errors import InvalidRequest


def set_field(message: ProtoMessage, field: str, value: object, name: str) -> None:
    """Sets a field; None leaves it unset. Raises InvalidRequest if protobuf cannot carry the value."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError):
        raise InvalidRequest(name, f"{_kind(value)} does not fit; {_expectation(message, field)}") from None


def set_fields(message: ProtoMessage, values: Mapping[str, Any], *names: str, **renamed: str) -> None:
    """Sets the fields of these names, and the `renamed` ones by the caller's names for them; see `set_field`."""
    for name, field in {**dict(zip(names, names, strict=True)), **renamed}.items():
        set_field(message, field, values.get(name), name)


def extend_field(message: ProtoMessage, field: str, values: Iterable[object], name: str) -> None:
    """Appends to a repeated field. Raises InvalidRequest if protobuf cannot carry a value."""
    try:
        getattr(message, field).extend(values)
    except (TypeError, ValueError):
        raise InvalidRequest(name, f"not every item fits; {_expectation(message, field)}") from None


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"


def _expectation(message: ProtoMessage, field: str) -> str:
    described = message.DESCRIPTOR.fields_by_name[field]
    kinds = {
        described.CPPTYPE_STRING: "text is expected",
        described.CPPTYPE_BOOL: "true or false is expected",
        described.CPPTYPE_DOUBLE: "a number is expected",
        described.CPPTYPE_INT32: "a whole number of at most 32 bits is expected",
        described.CPPTYPE_UINT32: "a whole number from 0 to 4294967295 is expected",
        described.CPPTYPE_INT64: "a whole number of at most 64 bits is expected",
    }
    return kinds[described.cpp_type]
