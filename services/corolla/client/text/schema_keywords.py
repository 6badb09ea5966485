"""The keywords of JSON Schema one by one: which values grammars can follow, and what two of them tell. Pure."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_MOST: Final = 1 << 31
_LARGEST: Final = 1e15
_SMALLEST: Final = 1e-9
_BEGINNING: Final = re.compile(r"\^(?:[A-Za-z0-9_ -](?![?*{]))+")
"""The characters with which each text begins that a pattern without alternatives matches."""

# Keywords that say nothing in these cases, so nothing is lost without them.
NEUTRAL: Final[Mapping[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "uniqueItems": lambda value: value is False,
        "not": lambda value: value is False,
        "if": lambda value: False,
        "contains": lambda value: False,
        "propertyNames": lambda value: value is True or value == {},
        "unevaluatedItems": lambda value: value is True or value == {},
        "dependentRequired": lambda value: value == {},
        "dependentSchemas": lambda value: value == {},
        "dependencies": lambda value: value == {},
        "$dynamicRef": lambda value: False,
        "$recursiveRef": lambda value: False,
    }
)
"""The keywords of JSON Schema that no grammar here follows. Those that are in no table are annotations."""

LEFT_OUT: Final = object()
"""A value that its keyword cannot have, or that grammars cannot follow."""
SAYS_NOTHING: Final = object()


def _type(value: Any, schema: Mapping[str, Any]) -> Any:
    many = value if isinstance(value, list) else [value]
    if not many or not all(isinstance(each, str) and each in _TYPES for each in many):
        return LEFT_OUT
    return value


def _format(value: Any, schema: Mapping[str, Any]) -> Any:
    """Formats of numbers say how programs store them, and nothing about JSON."""
    types = types_of([schema])
    if types is not None and "string" not in types:
        return SAYS_NOTHING
    return value if isinstance(value, str) and value in _FORMATS else LEFT_OUT


def count_of(value: Any) -> int | None:
    """The value as a count, which callers may write as 3.0; None for any other value."""
    return int(value) if is_number(value) and 0 <= value <= _LARGEST and value == int(value) else None


def _fewest(value: Any, schema: Mapping[str, Any]) -> Any:
    count = count_of(value)
    return LEFT_OUT if count is None or count > _MOST else count


def _most(value: Any, schema: Mapping[str, Any]) -> Any:
    count = count_of(value)
    return LEFT_OUT if count is None else SAYS_NOTHING if count > _MOST else count


def _bound(value: Any, schema: Mapping[str, Any]) -> Any:
    return value if is_number(value) and abs(value) <= _LARGEST else LEFT_OUT


def _exclusive(inclusive: str) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Reads `exclusiveMinimum` or its like; in draft 4, and in OpenAPI 3.0, true makes the other bound exclusive."""

    def read(value: Any, schema: Mapping[str, Any]) -> Any:
        if value is False:
            return SAYS_NOTHING
        return _bound(schema.get(inclusive) if value is True else value, schema)

    return read


SIMPLE: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], Any]]] = MappingProxyType(
    {
        "type": _type,
        "enum": lambda value, schema: value if isinstance(value, list) else LEFT_OUT,
        "const": lambda value, schema: value,
        "format": _format,
        "minLength": _fewest,
        "maxLength": _most,
        "minItems": _fewest,
        "maxItems": _most,
        "minimum": _bound,
        "maximum": _bound,
        "exclusiveMinimum": _exclusive("minimum"),
        "exclusiveMaximum": _exclusive("maximum"),
        "multipleOf": lambda value, schema: value if is_number(value) and _SMALLEST <= value <= _LARGEST else LEFT_OUT,
    }
)
FOLLOWED: Final = frozenset(
    {
        *SIMPLE, "pattern", "items", "prefixItems", "additionalItems", "properties", "required",
        "additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "maxProperties",
        "nullable",
    }
)  # fmt: skip


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def types_of(schemas: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
    """The types that a value of all these schemas may have; None: any."""
    found: frozenset[str] | None = None
    for schema in schemas:
        given = schema.get("type")
        many = given if isinstance(given, list) else [given]
        types = frozenset(many) if all(isinstance(each, str) and each in _TYPES for each in many) else None
        if types is None and (listed := listed_values(schema)) is not None:
            types = frozenset(map(_type_name, listed))
        if types is not None:
            found = types if found is None else found & types
    return found


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The only values that a schema allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _type_name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def have_no_common_value(many: Sequence[list[Any] | None]) -> bool:
    """No value is in two of the lists."""
    values = [f"{_type_name(value)} {value}" for each in many if each is not None for value in each]
    return None not in many and len(set(values)) == len(values)


def begin_differently(patterns: Collection[str]) -> bool:
    """It is plain that no text matches two of the patterns."""
    found = [_BEGINNING.match(each) for each in patterns]
    if None in found or any("|" in each for each in patterns):
        return False
    ordered = sorted(each.group() for each in found if each is not None)
    return not any(later.startswith(earlier) for earlier, later in pairwise(ordered))
