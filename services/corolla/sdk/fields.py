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
        raise InvalidRequest(name, f"{_kind(value)} does not fit") from None


def set_fields(message: ProtoMessage, values: Mapping[str, Any], *names: str, **renamed: str) -> None:
    """Sets the fields of these names, and the `renamed` ones by the caller's names for them; see `set_field`."""
    for name, field in {**dict(zip(names, names, strict=True)), **renamed}.items():
        set_field(message, field, values.get(name), name)


def extend_field(message: ProtoMessage, field: str, values: Iterable[object], name: str) -> None:
    """Appends to a repeated field. Raises InvalidRequest if protobuf cannot carry a value."""
    try:
        getattr(message, field).extend(values)
    except (TypeError, ValueError):
        raise InvalidRequest(name, "not every item fits") from None


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
