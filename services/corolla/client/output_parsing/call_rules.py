"""The rules for the calls of tools in an answer, and the grammar that enforces them. Pure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from corolla.client.output_parsing.formats import CallFormat, ReasoningFormat
from corolla.client.text.conversation import Tool
from corolla.client.text.formats import ANY_OBJECT, FormPart

Mark = Callable[[str], str]
"""Returns the grammar's notation for a text of the call format."""

FORM: Final = "form"
"""The name of the grammar for the text of an answer that calls no tool."""

_ANY_TEXT: Final = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules for calls. An answer may call `tools`; if `is_required`, it consists only of calls.

    If `has_form`, an answer without calls must have a form, which the grammar names `form`.
    """

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    may_be_several: bool = True
    has_form: bool = False

    @property
    def needs_grammar(self) -> bool:
        """The answer cannot be left to the model alone."""
        return bool(self.tools) and (self.is_required or self.has_form or any(tool.is_strict for tool in self.tools))

    @property
    def most_calls(self) -> int | None:
        return None if self.may_be_several else 1


def calls_grammar(
    rules: CallRules, calls: CallFormat, reasoning: ReasoningFormat | None, special_ids: Mapping[str, int]
) -> str | None:
    """A grammar of calls in llguidance's Lark; None if no grammar is needed.

    It refers to the arguments of the tool with index i as `@arguments_i`.

    Args:
        special_ids: ids, by text, of the tokens that a grammar must name by id; see `is_special_in_grammars`.
    """
    if not rules.needs_grammar:
        return None

    def mark(text: str) -> str:
        return f"<[{special_ids[text]}]>" if text in special_ids else json.dumps(text)

    only_calls = rules.is_required or rules.has_form
    lines = _required(rules, calls, mark) if only_calls else _free(rules, calls, mark)
    if reasoning is not None:
        lines = [lines[0].replace("start: ", "start: (thought spaces?)? ", 1), *lines[1:], *_thought(reasoning, mark)]
    lines += _written_calls(rules, calls, mark(calls.closing) if calls.closing else "")
    for index, tool in enumerate(rules.tools):
        if calls.infix:
            lines.append(f"call_{index}: {json.dumps(tool.name)} {mark(calls.infix)} @arguments_{index}")
        else:
            beginning = json.dumps(f'{{"name": "{tool.name}", "{calls.arguments_key}": ')
            lines.append(f'call_{index}: {beginning} @arguments_{index} "}}"')
    return "\n".join(["%llguidance {}", *lines, ""])


def arguments_parts(rules: CallRules) -> list[FormPart]:
    """The schemas to which the grammar of calls refers."""
    return [
        FormPart(
            f"arguments_{index}",
            json_schema={**tool.schema, "type": "object"} if rules.is_required or tool.is_strict else ANY_OBJECT,
            field=tool.field,
            is_strict=tool.is_strict and not tool.is_lenient,
            may_be_any=tool.is_lenient and not rules.is_required,
        )
        for index, tool in enumerate(rules.tools)
    ]


def is_special_in_grammars(text: str, *, is_special: bool) -> bool:
    """llguidance treats an added token as special, which it also does for any text like `<...>`."""
    return is_special or (text.startswith("<") and text.endswith(">"))


def _required(rules: CallRules, calls: CallFormat, mark: Mark) -> list[str]:
    """The grammar's rules for an answer that consists only of calls."""
    written = "bare_calls" if calls.may_be_bare else f"{mark(calls.opening)} calls"
    if rules.may_be_several and not (calls.separator or calls.is_list):
        gap = "" if calls.infix else r'"\n" '
        written = f"{written} ({gap}{written})*"
    if rules.has_form and not rules.is_required:
        written = f"({written} | @{FORM})"
    return [f"start: {written}"]


def _thought(reasoning: ReasoningFormat, mark: Mark) -> list[str]:
    """The grammar's rules for the reasoning before an answer."""
    is_lazy = "" if mark(reasoning.closing).startswith("<[") else "[lazy]"
    return [
        f"thought{is_lazy}: {mark(reasoning.opening)} {_ANY_TEXT} {mark(reasoning.closing)}",
        r"spaces: /\s+/",
    ]


def _free(rules: CallRules, calls: CallFormat, mark: Mark) -> list[str]:
    """The grammar's rules for any text in which every call that begins is completed."""
    # If a call needs no opening, text must not begin like a call: both would match, and the longer match wins.
    words = r"/[^{\s](.|\n)*/" if calls.may_be_bare else _ANY_TEXT
    is_special = mark(calls.opening).startswith("<[")
    opened = f"text? {mark(calls.opening)}" if is_special else "opened"
    lines = [] if is_special else [f"opened[lazy]: {words} {mark(calls.opening)}"]
    many = "*" if rules.may_be_several and not calls.may_be_bare else "?"
    bare = "bare_calls | " if calls.may_be_bare else ""
    return [f"start: ({bare}({opened} calls){many} text?)", f"text: {words}", *lines]


def _written_calls(rules: CallRules, calls: CallFormat, closing: str) -> list[str]:
    """The grammar's rules for the text after an opening."""
    one = "(" + " | ".join(f"call_{index}" for index in range(len(rules.tools))) + ")"
    several = one
    if calls.separator and rules.may_be_several:
        several = f'{one} ("{calls.separator} " {one})*'
    if calls.is_list:
        return [f'calls: "[" {several} {closing}']
    if calls.may_be_bare:
        return ["calls: bare_calls", f"bare_calls: {several}"]
    if calls.infix:
        return [f"calls: {one}"]
    return [rf'calls: "\n" {one} "\n" {closing}']
