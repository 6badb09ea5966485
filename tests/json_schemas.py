"""Schemas for answers: those of a public test suite, and ones that Hypothesis makes up."""

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SUITE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "schemas" / "suite.json").read_text())
"""Each with where it is `from`, and the `schema`."""

_NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=6)
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.text(max_size=5))


def _bounds(kind: str, low: str, high: str, least: int, most: int) -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(least, most), st.integers(least, most)).map(sorted)
    return bounds.map(lambda pair: {"type": kind, low: pair[0], high: pair[1]})


_LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    _bounds("integer", "minimum", "maximum", -1000, 1000),
    _bounds("number", "minimum", "maximum", -50, 50),
    _bounds("string", "minLength", "maxLength", 0, 8),
    st.sampled_from(["^[a-z]{1,5}$", "^(ab|cd)+e?$", "[0-9]", "^\\d{2}-\\d{2}$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "time", "uuid", "ipv4", "email"]).map(lambda form: {"type": "string", "format": form}),
    st.lists(_SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    _SCALARS.map(lambda value: {"const": value}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_NAMES, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    closed = {"additionalProperties": False} if draw(st.booleans()) else {}
    return {"type": "object", "properties": properties, "required": required, **closed}


def _composed(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, bounds: {**bounds, "items": items}, inner, _bounds("array", "minItems", "maxItems", 0, 3)
    )
    return st.one_of(_objects(inner), arrays, st.lists(inner, min_size=1, max_size=3).map(lambda all_: {"anyOf": all_}))


SCHEMAS = st.recursive(_LEAVES, _composed, max_leaves=8)


def made_schemas(number: int) -> list[dict[str, Any]]:
    """The same ones each time."""
    made: list[dict[str, Any]] = []

    @settings(
        max_examples=number, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(SCHEMAS)
    def collect(schema: dict[str, Any]) -> None:
        made.append(schema)

    collect()
    return made[:number]
