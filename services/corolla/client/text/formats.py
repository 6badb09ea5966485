"""Converts forms of answers to grammars. Pure."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.schemas import MAX_SCHEMA_BYTES, followed, parsed
from corolla.decoding.grammar_text import grammar_text, regex_rule

MAX_CHOICES: Final = 256
MAX_CHOICE_CHARS: Final = 1024

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
"""The schema that every object fits."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """A grammar in Lark's notation, or a JSON Schema.

    Attributes:
        name: the name by which the first part of a form refers to this one; empty for the first part.
        json_schema: the schema, or its text as the caller wrote it; None: the part is the grammar `lark`.
        field: the request's field that holds the schema.
        is_strict: whether a keyword that grammars cannot follow is refused.
        may_be_any: whether any object will do where no grammar can follow the schema.
    """

    name: str = ""
    lark: str = ""
    json_schema: str | Mapping[str, Any] | None = None
    field: str = ""
    is_strict: bool = False
    may_be_any: bool = False


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of an answer.

    Attributes:
        field: the request's field that asks for it.
        parts: the first one is the grammar of the whole answer, which may refer to the others by name.
        ignored: the fields whose schemas the form does not follow although it might.
    """

    field: str
    parts: tuple[FormPart, ...]
    ignored: tuple[str, ...] = ()

    @property
    def loosened(self) -> "AnswerFormat | None":
        """The form that does not follow the schemas that it need not follow; None if it has to follow all."""
        loose = {part.field: FormPart(part.name, json_schema=ANY_OBJECT) for part in self.parts if part.may_be_any}
        if not loose:
            return None
        parts = tuple(loose.get(part.field, part) if part.may_be_any else part for part in self.parts)
        return AnswerFormat(self.field, parts, (*self.ignored, *loose))

    @property
    def text(self) -> str:
        """The form for the process that checks it, by which results are remembered."""
        return json.dumps([self.field, [asdict(part) for part in self.parts]], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class FormGrammar:
    """The grammar of a form.

    Attributes:
        text: the grammar for llguidance.
        ignored: the places of the keywords that it leaves out.
        patterns: the regular expressions of its schemas.
        schemas: the grammar of each schema alone, by the request's field that holds it.
    """

    text: str
    ignored: tuple[str, ...] = ()
    patterns: frozenset[str] = frozenset()
    schemas: Mapping[str, str] | None = None


def form_of(text: str) -> AnswerFormat:
    """The form that `AnswerFormat.text` describes."""
    name, parts = json.loads(text)
    return AnswerFormat(name, tuple(FormPart(**each) for each in parts))


def grammar_of(form: AnswerFormat, unreadable: Collection[str] = ()) -> FormGrammar:
    """The grammar of a form. Raises InvalidRequest if a schema is wrong, or is strict and cannot be followed.

    Args:
        unreadable: the regular expressions that llguidance refuses, which are left out.
    """
    ignored = [*form.ignored]
    patterns: set[str] = set()
    parts: list[dict[str, Any]] = []
    schemas: dict[str, str] = {}
    for part in form.parts:
        named = {"name": part.name} if part.name else {}
        if part.json_schema is None:
            parts.append({**named, "lark_grammar": part.lark})
            continue
        given = part.json_schema
        schema = parsed(given, part.field) if isinstance(given, str) else given
        found = followed(schema, part.field, is_strict=part.is_strict, unreadable=unreadable)
        parts.append({**named, "json_schema": found.schema})
        ignored += found.ignored
        patterns |= found.patterns
        schemas[part.field] = grammar_text({"json_schema": found.schema})
    return FormGrammar(grammar_text(*parts), tuple(ignored), frozenset(patterns), schemas)


def json_object(field: str) -> AnswerFormat:
    """The form of any JSON object."""
    return AnswerFormat(field, (FormPart(json_schema=ANY_OBJECT, field=field),))


def json_schema(schema: str, field: str, *, is_strict: bool = False) -> AnswerFormat:
    """The form of JSON that fits a schema, with properties in the schema's order. Raises InvalidRequest as `regex`."""
    _check_size(schema, field)
    return AnswerFormat(field, (FormPart(json_schema=schema, field=field, is_strict=is_strict),))


def regex(expression: str, field: str) -> AnswerFormat:
    """The form of texts that a regular expression matches. Raises InvalidRequest if it is empty or too large."""
    _check_size(expression, field)
    return AnswerFormat(field, (FormPart(lark=regex_rule(expression)),))


def lark(grammar: str, field: str) -> AnswerFormat:
    """The form of texts that fit the rule `start` of a grammar in Lark's notation. Raises InvalidRequest as `regex`."""
    _check_size(grammar, field)
    return AnswerFormat(field, (FormPart(lark=grammar),))


def calls_or(
    calls: str, arguments: Sequence[FormPart], form: AnswerFormat | None, name: str, field: str
) -> AnswerFormat:
    """The form of answers that call tools or, where the grammar of calls names another one, have that form.

    Args:
        calls: a grammar of calls in Lark's notation.
        arguments: the schemas to which it refers by name.
        form: the form of an answer without calls, which the grammar calls `name`; None: the grammar names no other one.
    """
    parts = FormPart(lark=calls), *arguments
    if form is None:
        return AnswerFormat(field, parts)
    return AnswerFormat(form.field, (*parts, replace(form.parts[0], name=name)))


def choice(texts: Sequence[str], field: str) -> AnswerFormat:
    """The form of one of several texts. Raises InvalidRequest if their number or a length is not allowed."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequest(field, f"must be 1 to {MAX_CHOICES} texts")
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= MAX_CHOICE_CHARS:
            raise InvalidRequest(f"{field}[{index}]", f"must have 1 to {MAX_CHOICE_CHARS} characters")
    _check_size("".join(texts), field)
    return AnswerFormat(field, (FormPart(lark="start: " + " | ".join(map(json.dumps, texts))),))


def _check_size(text: str, field: str) -> None:
    if not text:
        raise InvalidRequest(field, "must not be empty")
    if len(text.encode(errors="surrogatepass")) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(field, f"must have at most {MAX_SCHEMA_BYTES >> 10} KiB")
