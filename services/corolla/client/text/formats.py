"""Converts forms of answers to grammars. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final

from corolla.chassis.errors import InvalidRequest
from corolla.decoding.grammar_text import as_grammar, regex_grammar

MAX_FORMAT_BYTES: Final = 64 << 10
MAX_CHOICES: Final = 256
MAX_CHOICE_CHARS: Final = 1024

# The layout is that of `json.dumps`, which models know best; with free spaces, a model might never end. Schemas with
# parts that llguidance cannot follow are refused, since these options replace a schema's own.
_JSON_OPTIONS: Final = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of an answer: a grammar, and the request's field that asked for it.

    Attributes:
        fallback: the form to use if this one cannot be a grammar; None: it is refused then.
        parts: forms of parts of the grammar, which tell where a problem is, by the words for each part.
    """

    grammar: str
    field: str
    fallback: "AnswerFormat | None" = None
    parts: Mapping[str, "SchemaPart"] = dataclass_field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema within a grammar, and the grammar of that schema alone."""

    schema: Mapping[str, Any]
    grammar: str


def json_object(field: str) -> AnswerFormat:
    """The form of any JSON object."""
    return _of_schema({"type": "object"}, field)


def json_schema(schema: str, field: str) -> AnswerFormat:
    """The form of JSON that fits a schema, with properties in the schema's order.

    Raises:
        InvalidRequest: the schema is too large, or is not a JSON object.
    """
    _check_size(schema, field)
    try:
        value = json.loads(schema)
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
    except ValueError:
        raise InvalidRequest(field, "must be JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be an object in JSON")
    return _of_schema(value, field)


def regex(expression: str, field: str) -> AnswerFormat:
    """The form of texts that a regular expression matches. Raises InvalidRequest if it is empty or too large."""
    _check_size(expression, field)
    return AnswerFormat(regex_grammar(expression), field)


def lark(grammar: str, field: str) -> AnswerFormat:
    """The form of texts that fit the rule `start` of a grammar in Lark's notation. Raises InvalidRequest as `regex`."""
    _check_size(grammar, field)
    return AnswerFormat(as_grammar("lark_grammar", grammar), field)


def schema_part(schema: Mapping[str, Any]) -> SchemaPart:
    """The part for a schema that answers must fit."""
    return SchemaPart(schema, _of_schema({**schema, "type": "object"}, "").grammar)


def calls_or(calls: str, form: AnswerFormat | None, name: str, field: str) -> AnswerFormat:
    """The form of answers that call tools or, where the grammar of calls names another one, have that form.

    Args:
        calls: a grammar of calls in Lark's notation.
        form: the form of an answer without calls, which the grammar calls `name`; None: the grammar names no other one.

    Raises InvalidRequest as `regex`.
    """
    grammar = lark(calls, field).grammar
    if form is None:
        return AnswerFormat(grammar, field)
    parts = [*json.loads(grammar)["grammars"], {**json.loads(form.grammar)["grammars"][0], "name": name}]
    return AnswerFormat(json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":")), form.field)


def choice(texts: Sequence[str], field: str) -> AnswerFormat:
    """The form of one of several texts. Raises InvalidRequest if their number or a length is not allowed."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(field, f"must be 1 to {MAX_CHOICES} texts")
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= MAX_CHOICE_CHARS:
            raise InvalidRequest(f"{field}[{index}]", f"must have 1 to {MAX_CHOICE_CHARS} characters")
    _check_size("".join(texts), field)
    return AnswerFormat(as_grammar("lark_grammar", "start: " + " | ".join(map(json.dumps, texts))), field)


def _of_schema(schema: dict[str, Any], field: str) -> AnswerFormat:
    return AnswerFormat(as_grammar("json_schema", {**schema, "x-guidance": _JSON_OPTIONS}), field)


def _check_size(text: str, field: str) -> None:
    if not text:
        raise InvalidRequest(field, "must not be empty")
    if len(text.encode(errors="surrogatepass")) > MAX_FORMAT_BYTES:
        raise InvalidRequest(field, f"must have at most {MAX_FORMAT_BYTES >> 10} KiB")
