"""JSON Schemas of tools: which parts of them grammars cannot follow. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_UNREADABLE: Final = re.compile(r"\(\?(?:=|!|<=|<!)|\\[1-9]|\\[zZGK]")
"""Parts of regular expressions that grammars cannot follow: what they look at before or behind, or say twice."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
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
