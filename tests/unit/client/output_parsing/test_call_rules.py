"""Grammars of calls, read by llguidance: what fits is a call that the parser finds, and nothing else fits."""

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from corolla.client.output_parsing.call_rules import CallRules, arguments_parts, calls_grammar, is_special_in_grammars
from corolla.client.output_parsing.deltas import joined
from corolla.client.output_parsing.formats import HERMES, LLAMA, MISTRAL, MISTRAL_V11, CallFormat, ReasoningFormat
from corolla.client.output_parsing.parser import MarkupParser
from corolla.client.text import formats
from corolla.client.text.conversation import Tool
from tests.checkpoints import make_tokenizer

SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
THINK = ReasoningFormat("<think>", "</think>")
WEATHER = Tool(
    "get_weather",
    "",
    {
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer"}},
    },
)
NOW = Tool("now")
BOTH = CallRules((WEATHER, NOW), is_required=True)
FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-v11": MISTRAL_V11}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer: Any = make_tokenizer()
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def read_by(tokenizer: Any) -> LLTokenizer:
    return from_tokenizer(tokenizer)


def call(name: str, arguments: dict[str, Any], calls: CallFormat) -> str:
    if calls.infix:
        return f"{name}{calls.infix}{json.dumps(arguments)}"
    return json.dumps({"name": name, calls.arguments_key: arguments})


def answer_of(calls: CallFormat, *objects: str) -> str:
    if calls.is_list:
        return f"{calls.opening}[{', '.join(objects)}]"
    if calls.may_be_bare:
        return "; ".join(objects)
    if calls.infix:
        return "".join(f"{calls.opening}{each}" for each in objects)
    return "\n".join(f"{calls.opening}\n{each}\n{calls.closing}" for each in objects)


class Reader:
    """Whether a grammar takes a text, as the beginning of an answer and as a whole one."""

    def __init__(self, tokenizer: Any, read_by: LLTokenizer, rules: CallRules, calls: CallFormat, **options: Any):
        special_ids = {
            str(token): token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if is_special_in_grammars(str(token), is_special=token.special)
        }
        grammar = calls_grammar(rules, calls, options.get("reasoning", THINK), special_ids)
        assert grammar is not None
        form = formats.calls_or(grammar, arguments_parts(rules), None, "", "tools")
        self._matcher = LLMatcher(read_by, formats.grammar_of(form).text, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._tokenizer = tokenizer

    def takes(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS.keys())
def test_required_calls_fit_their_schemas(tokenizer: Any, read_by: LLTokenizer, calls: CallFormat) -> None:
    reader = Reader(tokenizer, read_by, BOTH, calls)
    paris, now = call("get_weather", {"city": "Paris", "days": 2}, calls), call("now", {}, calls)
    for whole in [answer_of(calls, now), answer_of(calls, paris), answer_of(calls, paris, now, paris)]:
        assert reader.takes(whole)
        assert reader.takes("<think>Is it <x>?\n</think>\n\n" + whole)
        parser = MarkupParser(calls, THINK, {"get_weather", "now"})
        whole_delta = joined([*map(parser.push, whole), parser.finish()])
        assert (whole_delta.text, parser.num_calls) == ("", whole.count(calls.infix or '"name"'))
    for broken in [
        "",
        "Well.",
        "Well. " + answer_of(calls, now),
        answer_of(calls, now) + " Well.",
        answer_of(calls, call("rm", {}, calls)),
        answer_of(calls, call("now", {"a": 1}, calls)),
        answer_of(calls, call("get_weather", {}, calls)),
        answer_of(calls, call("get_weather", {"city": "Berlin"}, calls)),
        answer_of(calls, call("get_weather", {"city": "Rome", "days": "2"}, calls)),
        answer_of(calls, now)[:-1] if not calls.may_be_bare else now[:-1],
    ]:
        assert not reader.takes(broken), broken
    assert not Reader(tokenizer, read_by, BOTH, calls, reasoning=None).takes("<think></think>" + answer_of(calls, now))


@pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS.keys())
def test_one_call_where_several_are_not_wanted(tokenizer: Any, read_by: LLTokenizer, calls: CallFormat) -> None:
    reader = Reader(tokenizer, read_by, CallRules((NOW,), is_required=True, may_be_several=False), calls)
    now = call("now", {}, calls)
    assert reader.takes(answer_of(calls, now))
    assert not reader.takes(answer_of(calls, now, now))


@pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS.keys())
def test_calls_of_strict_tools_fit_where_none_is_required(
    tokenizer: Any, read_by: LLTokenizer, calls: CallFormat
) -> None:
    reader = Reader(tokenizer, read_by, CallRules((replace(WEATHER, is_strict=True), NOW)), calls)
    paris = call("get_weather", {"city": "Paris"}, calls)
    whole = answer_of(calls, paris)
    for text in ["", "Well, no.\n", whole, answer_of(calls, call("now", {"any": 1}, calls))]:
        assert reader.takes(text), text
    if not calls.may_be_bare:
        assert reader.takes("<think>Hm</think>\nWell:\n" + whole)
    for broken in ["Berlin", "", "Paris\n"]:
        assert not reader.takes(answer_of(calls, call("get_weather", {"city": broken}, calls)))


def test_nothing_is_constrained_where_nothing_has_to_fit() -> None:
    for rules in [CallRules(), CallRules((WEATHER, NOW)), CallRules((), is_required=True)]:
        assert calls_grammar(rules, HERMES, None, {}) is None
