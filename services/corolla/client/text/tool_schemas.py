"""JSON Schemas of tools: which parts of them grammars cannot follow. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_UNREADABLE: Final = re.compile(r"\(\?(?:=|!|<=|<!)|\\[1-9]|\\[zZGK]")
"""Parts of regular expressions that grammars cannot follow: what they look at before or behind, or say twice."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OPEN: Final = frozenset(
    {
        "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "$ref", "allOf", "anyOf",
        "oneOf", "not", "if", "dependentSchemas",
    }
)  # fmt: skip
"""A schema with one of these keywords allows properties that it does not name itself."""
_KEYWORDS: Final = re.compile(r'"([^"\\]{1,64})"')


def readable(schema: Any) -> Any:
    """The schema without the patterns that grammars cannot read; arguments need not match those."""
    if isinstance(schema, list):
        return [readable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: readable(value)
        for name, value in schema.items()
        if not (name == "pattern" and isinstance(value, str) and _UNREADABLE.search(value))
        and not (name == "patternProperties" and isinstance(value, dict) and any(map(_UNREADABLE.search, value)))
    }


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments with the properties that it names, and no others unless it speaks of others.

    Functions take no arguments that they do not declare.
    """
    found = dict(_closed(schema))
    if schema.get("properties") == {} and _says_all(schema):
        found["additionalProperties"] = False
    return found


def _closed(schema: Any) -> Any:
    """Closes the objects in a schema. Without a named property, an object within the arguments may have any."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict) or _OPEN & schema.keys():
        return schema
    found = {name: _closed(value) if name in ("items", "prefixItems") else value for name, value in schema.items()}
    if isinstance(properties := schema.get("properties"), dict) and properties:
        found["properties"] = {name: _closed(value) for name, value in properties.items()}
        if _says_all(schema):
            found["additionalProperties"] = False
    return found


def _says_all(schema: Mapping[str, Any]) -> bool:
    """True if an object's schema names all properties that it requires or allows."""
    required = schema.get("required")
    named = set(required) if isinstance(required, list) and all(isinstance(each, str) for each in required) else set()
    return not _OPEN & schema.keys() and named <= schema["properties"].keys()


def place_of_problem(schema: Mapping[str, Any], problem: str) -> str:
    """The property and the keyword that a problem with the grammar of a schema is about; empty if it names none."""
    _, found, names = problem.partition("Unimplemented keys: ")
    keywords = set(_KEYWORDS.findall(names)) if found else set()
    for place, name, value in _keywords(schema):
        is_pattern = name == "pattern" and isinstance(value, str) and _UNREADABLE.search(value) is not None
        if name in keywords or (not found and is_pattern):
            of = f"the property {place!r}" if place else "the object itself"
            return f"{of} has the keyword {name!r}, which grammars cannot follow"
    return ""


def _keywords(schema: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields each keyword of a schema with the property that it is for, and its value."""
    if isinstance(schema, list):
        for each in schema:
            yield from _keywords(each, place)
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            for inner, part in value.items():
                yield from _keywords(part, f"{place}.{inner}" if place else inner)
            continue
        yield place, name, value
        if name not in ("enum", "const", "default", "examples"):
            yield from _keywords(value, place)
