"""The faults of a body that pydantic found, as an error in the caller's words. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from corolla.chassis.errors import InvalidRequest, MalformedMessage
from corolla.http.field_paths import joined

_MOST_NAMED: Final = 8
_MOST_FAULTS: Final = 32
_EXPECTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a text",
}
"""What a value must be, by pydantic's name of the fault."""

_LITERALS: Final = {"False": "false", "True": "true", "''": "empty"}
_PARTS: Final = re.compile(r"[^.\[\]]+|\[[0-9]+\]")


def refusal(given: Any, failure: ValidationError) -> InvalidRequest:
    """The error that names the faults of a body, by field and without the body's values.

    Args:
        given: the body, or its JSON.
    """
    # The description of a fault takes far more memory than the bytes that caused it.
    if failure.error_count() > _MOST_FAULTS:
        return InvalidRequest("body", f"has more than {_MOST_FAULTS} faults")
    problems = failure.errors(include_url=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        # The sentence has the position, and no part of the body.
        return MalformedMessage("body", f"is not JSON: {problems[0]['msg'].removeprefix('Invalid JSON: ')}")
    given = from_json(given) if isinstance(given, bytes) else given
    expected: dict[str, list[str]] = {}
    other: dict[str, str] = {}
    for each in problems:
        place = _place(given, each)
        if each["type"].startswith("union_tag_"):
            place = joined(place, each["ctx"]["discriminator"].strip("'"))
        if (wanted := _wanted(each)) is None:
            other.setdefault(place, _sentence(each))
        elif wanted not in expected.setdefault(place, []):
            expected[place].append(wanted)
    # A list that is too long is of the right kind: what the other members of its union miss does not matter.
    too_long = {_place(given, each) for each in problems if each["type"] == "too_long"}
    found = {place: f"must be {' or '.join(wanted)}" for place, wanted in expected.items()} | other
    found = {place: text for place, text in found.items() if not any(_is_within(place, each) for each in too_long)}
    # The member of a union that fits best fails deepest within the value, or latest within a list.
    kept = [(place, text) for place, text in found.items() if not any(_fits_better(each, place) for each in found)]
    first, *more = kept[:_MOST_NAMED]
    return InvalidRequest(*first, *more)


def _wanted(problem: Mapping[str, Any]) -> str | None:
    """What the value must be, for faults that the members of a union share; None: the fault needs its own sentence."""
    kind = problem["type"]
    if kind == "literal_error":
        expected = str(problem["ctx"]["expected"])
        return _LITERALS.get(expected, expected)
    if kind == "union_tag_invalid":
        return " or ".join(str(problem["ctx"]["expected_tags"]).rsplit(", ", 1))
    return _EXPECTED.get(kind)


def _sentence(problem: Mapping[str, Any]) -> str:
    if problem["type"] in ("missing", "union_tag_not_found"):
        return "must be set"
    if problem["type"] == "too_long":
        return f"must be at most {problem['ctx']['max_length']}"
    text = str(problem["msg"]).removeprefix("Value error, ")
    for words in ("Input should ", "String should ", "List should ", "Dictionary should ", "Value should "):
        text = text.replace(words, "must ", 1) if text.startswith(words) else text
    return text


def _fits_better(place: str, other: str) -> bool:
    """The fault lies within another one, or later in the same list. Lists fail at their first wrong element."""
    parts, others = _PARTS.findall(place), _PARTS.findall(other)
    for part, of_other in zip(parts, others, strict=False):
        if part != of_other:
            are_places = part.startswith("[") and of_other.startswith("[")
            return are_places and int(part[1:-1]) > int(of_other[1:-1])
    return len(parts) > len(others)


def _is_within(place: str, outer: str) -> bool:
    return place.startswith((f"{outer}.", f"{outer}["))


def _place(given: Any, problem: Mapping[str, Any]) -> str:
    """The path of a fault in a body, such as `messages[0].content`, without pydantic's names for members of unions."""
    text, num_following = "", len(problem["loc"])
    for part in problem["loc"]:
        num_following -= 1
        if isinstance(part, int):
            text += f"[{part}]"
            given = given[part] if isinstance(given, list) and part < len(given) else None
        elif isinstance(given, dict) and part in given:
            text, given = joined(text, part), given[part]
        elif problem["type"] == "missing" and not num_following:
            text = joined(text, part)
    return text or "body"
