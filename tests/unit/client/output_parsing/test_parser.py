"""Answers are kept apart alike wherever they are cut; what does not become a call stays text."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.client.output_parsing.deltas import Delta, joined
from corolla.client.output_parsing.formats import HERMES, LLAMA, MISTRAL, MISTRAL_V11, CallFormat, ReasoningFormat
from corolla.client.output_parsing.parser import MarkupParser, State

THINK = ReasoningFormat("<think>", "</think>")
NAMES = frozenset({"get_weather", "now"})
CALL_FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral-v11": MISTRAL_V11}
FORMATS: dict[str, CallFormat | None] = {**CALL_FORMATS, "none": None}


def read(calls: CallFormat | None, *chunks: str, **options: Any) -> Delta:
    """The result of a parser for an answer that comes in these chunks."""
    parser = MarkupParser(calls, options.pop("reasoning", THINK), NAMES, "id{}".format, **options)
    deltas = [*(parser.push(chunk) for chunk in chunks), parser.finish()]
    delta = joined(deltas)
    assert parser.num_calls == len(delta.calls)
    return delta


def calls_of(delta: Delta) -> list[tuple[str, str]]:
    assert [(call.index, call.id) for call in delta.calls] == [(i, f"id{i}") for i in range(len(delta.calls))]
    return [(call.name, call.arguments_delta) for call in delta.calls]


PARIS = '{"city": "Paris } \\" ]"}'
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS + "}\n</tool_call>"
NOW = '<tool_call>{"name":"now","arguments":{}}</tool_call>'


@pytest.mark.parametrize(
    "calls, answer, text, expected",
    [
        (HERMES, HERMES_CALL, "", [("get_weather", PARIS)]),
        (HERMES, "\n" + HERMES_CALL + "\n" + NOW + " ", "", [("get_weather", PARIS), ("now", "{}")]),
        (HERMES, "Let me see.\n" + NOW, "Let me see.", [("now", "{}")]),
        (HERMES, NOW + "\n Well.", "\n Well.", [("now", "{}")]),
        (HERMES, '<tool_call>{"arguments": {"a": [1]}, "name": "now"}</tool_call>', "", [("now", '{"a": [1]}')]),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', "", [("now", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
        (HERMES, "<tool_call>{'name': 'now'}</tool_call>", None, []),
        (HERMES, "<tool_call>now()</tool_call>", None, []),
        (HERMES, "a <tool_cal", None, []),
        (HERMES, "a <tool_call> ", None, []),
        (HERMES, '<tool_call>{"name": "no', None, []),
        (HERMES, '{"name": "now", "arguments": {}}', None, []),
        (HERMES, "a < b  \n", None, []),
        # Cut off within the arguments: a call that is cut off.
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x\\', "", [("now", '{"a": "x\\')]),
        # Broken within the arguments: what follows is text.
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": <b', "<b", [("now", '{"a": ')]),
        (LLAMA, '{"name": "now", "parameters": {"a": {}}}', "", [("now", '{"a": {}}')]),
        (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", "{}")]),
        (LLAMA, '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
        (
            LLAMA,
            '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
            "",
            [("now", "{}"), ("get_weather", "{}")],
        ),
        (LLAMA, '  {"answer": {"name": "now", "parameters": {}}}', None, []),
        (LLAMA, 'Well: {"name": "now", "parameters": {}}', None, []),
        (LLAMA, "<|python_tag|>import os", None, []),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefgh1"}, {"name": "now", "arguments": {"a": 1}}]',
            "",
            [("now", "{}"), ("now", '{"a": 1}')],
        ),
        (MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}}', "", [("now", "{}")]),
        (MISTRAL, "[TOOL_CALLS]now", None, []),
        (MISTRAL_V11, "[TOOL_CALLS]get_weather[ARGS]" + PARIS, "", [("get_weather", PARIS)]),
        (
            MISTRAL_V11,
            "Well.\n[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS] " + PARIS,
            "Well.",
            [("now", "{}"), ("get_weather", PARIS)],
        ),
        (MISTRAL_V11, "[TOOL_CALLS]now[ARGS]{} Well.", " Well.", [("now", "{}")]),
        (MISTRAL_V11, '[TOOL_CALLS]now[ARGS]{"a": "x\\', "", [("now", '{"a": "x\\')]),
        (MISTRAL_V11, '[TOOL_CALLS]now[ARGS]{"a": <b', "<b", [("now", '{"a": ')]),
        (MISTRAL_V11, "[TOOL_CALLS]rm[ARGS]{}", None, []),
        (MISTRAL_V11, "[TOOL_CALLS]nowadays[ARGS]{}", None, []),
        (MISTRAL_V11, "[TOOL_CALLS]now[ARGS][]", None, []),
        (MISTRAL_V11, "[TOOL_CALLS]now[ARGS]", None, []),
        (MISTRAL_V11, "[TOOL_CALLS]no", None, []),
        (MISTRAL_V11, '[TOOL_CALLS][{"name": "now", "arguments": {}}]', None, []),
        (None, HERMES_CALL, None, []),
    ],
)
def test_calls_are_kept_apart_from_text(
    calls: CallFormat | None, answer: str, text: str | None, expected: list[tuple[str, str]]
) -> None:
    """None: all of the answer."""
    delta = read(calls, answer)
    assert delta.text == (answer if text is None else text)
    assert calls_of(delta) == expected
    assert calls_of(read(calls, *answer)) == expected


@pytest.mark.parametrize(
    "answer, state, reasoning, text",
    [
        ("<think>\nHm.\n</think>\n\nYes.", State.BEGINNING, "Hm.", "Yes."),
        ("\n<think>Hm </think>", State.BEGINNING, "Hm", ""),
        ("Yes <think>Hm</think>", State.BEGINNING, "", "Yes <think>Hm</think>"),
        (" Yes", State.BEGINNING, "", " Yes"),
        ("Hm.\n</think>\nYes.", State.INSIDE, "Hm.", "Yes."),
        ("Hm. ", State.INSIDE, "Hm. ", ""),
        ("<think>Hm", State.TEXT, "", "<think>Hm"),
        ("<thin", State.BEGINNING, "", "<thin"),
        ("<think>a</thin", State.BEGINNING, "a</thin", ""),
    ],
)
def test_reasoning_is_kept_apart(answer: str, state: State, reasoning: str, text: str) -> None:
    for chunks in ([answer], list(answer)):
        delta = read(HERMES, *chunks, state=state)
        assert (delta.reasoning, delta.text, delta.calls) == (reasoning, text, ())


def test_calls_come_behind_reasoning_and_at_once_where_the_prompt_began_it() -> None:
    thinking = read(HERMES, "<think>Is <tool_call> right?</think>\n" + NOW)
    assert (thinking.reasoning, thinking.text, calls_of(thinking)) == ("Is <tool_call> right?", "", [("now", "{}")])
    assert calls_of(read(HERMES, NOW, state=State.INSIDE)) == [("now", "{}")]
    assert read(HERMES, "Is it " + NOW, state=State.INSIDE).reasoning == "Is it " + NOW


def test_arguments_come_as_they_are_written_and_text_at_once() -> None:
    parser = MarkupParser(HERMES, None, NAMES, str)
    assert parser.push("Let me").text == "Let me"
    assert parser.push(" see. ").text == " see."
    assert parser.push('\n<tool_call>{"name": "now", ').calls == ()
    (begun,) = parser.push('"arguments": {"a": ').calls
    assert (begun.id, begun.name, begun.arguments_delta) == ("0", "now", '{"a": ')
    (more,) = parser.push('"b').calls
    assert (more.id, more.name, more.arguments_delta) == ("", "", '"b')
    assert parser.push('"}}').calls[0].arguments_delta == '"}'
    assert parser.finish() == Delta()


def test_text_that_cannot_be_a_call_any_more_comes_at_once() -> None:
    parser = MarkupParser(MISTRAL_V11, None, NAMES, str)
    assert parser.push("[TOOL_CALLS]no").text == ""
    assert parser.push("t that").text == "[TOOL_CALLS]not that"
    assert parser.push("[TOOL_CALLS]now[ARGS]").calls == ()
    (begun,) = parser.push('{"a"').calls
    assert (begun.name, begun.arguments_delta) == ("now", '{"a"')


def test_no_more_calls_than_wanted() -> None:
    delta = read(HERMES, HERMES_CALL + NOW, most_calls=1)
    assert (calls_of(delta), delta.text) == ([("get_weather", PARIS)], "")


CHUNKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "<|python_tag|>", ";", ",", "<think>", "</think>", "\n",
    " ", "{", "}", '{"name": "now", "arguments": ', '{"name": "get_weather", "parameters": ', '{"a": "}"}', "{}", '"',
    "\\", '"name"', '"x"', ": ", "é😀", "<", "abc", '{"arguments": {"a": 1}, "name": "now"}', "1.5", "null",
    "now", "[ARGS]", "[CALL_ID]a1",
)  # fmt: skip
WORDS = st.text(max_size=6)
ANSWERS = st.lists(st.sampled_from(CHUNKS), max_size=14).map("".join)


@pytest.mark.parametrize("calls", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("state", [State.BEGINNING, State.INSIDE, State.TEXT])
@given(answer=ANSWERS, cuts=st.lists(st.integers(0, 80), max_size=12))
def test_it_does_not_matter_where_an_answer_is_cut(
    calls: CallFormat | None, state: State, answer: str, cuts: list[int]
) -> None:
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    chunks = [answer[start:end] for start, end in itertools.pairwise(places)]
    whole = read(calls, answer, state=state)
    assert read(calls, *chunks, state=state) == whole
    assert read(calls, *answer, state=state) == whole


@pytest.mark.parametrize("calls", CALL_FORMATS.values(), ids=CALL_FORMATS.keys())
@given(
    arguments=st.lists(
        st.dictionaries(WORDS, WORDS | st.integers() | st.lists(WORDS, max_size=2), max_size=2), min_size=1, max_size=3
    ),
    text=st.text(st.characters(exclude_characters="<[{"), max_size=9),
)
def test_any_arguments_come_back(calls: CallFormat, arguments: list[dict[str, Any]], text: str) -> None:
    objects = [json.dumps({"name": "now", calls.arguments_key: each}, ensure_ascii=False) for each in arguments]
    if calls.infix:
        answer = "".join(f"{calls.opening}now{calls.infix}{json.dumps(each, ensure_ascii=False)}" for each in arguments)
    elif calls.is_list:
        answer = calls.opening + "[" + ", ".join(objects) + "]"
    elif calls.separator:
        answer = calls.opening + "; ".join(objects)
    else:
        answer = "\n".join(f"{calls.opening}\n{each}\n{calls.closing}" for each in objects)
    delta = read(calls, text + answer)
    assert [json.loads(call.arguments_delta) for call in delta.calls] == arguments
    assert delta.text.rstrip() == text.rstrip()


@given(answer=st.text())
def test_without_formats_an_answer_is_its_text(answer: str) -> None:
    assert read(None, *answer, reasoning=None) == Delta(text=answer)


CALLED: dict[str, tuple[CallFormat, list[str]]] = {
    "hermes": (HERMES, ["<tool_call>\n", '{"name": "now", "arguments": {"a": [1]}}', "\n</tool_call>", "\n"]),
    "llama": (LLAMA, ["<|python_tag|>", '{"name": "now", "parameters": {"a": [1]}}', "; "]),
    "mistral": (MISTRAL, ["[TOOL_CALLS] [", '{"name": "now", "arguments": {"a": [1]}}', ", "]),
    "mistral-v11": (MISTRAL_V11, ["[TOOL_CALLS]", 'now[ARGS]{"a": [1]}']),
}


def cut(calls: CallFormat | None, text: str, step: int = 1, **options: Any) -> Delta:
    """The result of a parser for an answer that is cut off behind this text."""
    parser = MarkupParser(calls, options.pop("reasoning", THINK), NAMES, "id{}".format, **options)
    deltas = [parser.push(text[start : start + step]) for start in range(0, len(text), step)]
    return joined([*deltas, parser.finish(is_cut=True)])


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_answer_of_calls_has_no_text_wherever_it_is_cut_off(name: str, step: int) -> None:
    calls, parts = CALLED[name]
    answer = "".join(parts + ([] if calls.separator == ";" or calls.is_list else parts[:2]))
    answer += "".join(parts[1:2]) if calls.separator else ""
    for length in range(len(answer) + 1):
        found = cut(calls, answer[:length], step, has_text=False)
        assert (found.text, found.reasoning) == ("", ""), answer[:length]
        assert all('{"a": [1]}'.startswith(call.arguments_delta) for call in found.calls)


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("step", [1, 1000])
def test_text_before_a_call_that_is_cut_off_stays(name: str, step: int) -> None:
    calls, parts = CALLED[name]
    for length in range(len(calls.opening) // 2 + 1, len("".join(parts[:2]))):
        found = cut(calls, "Let me see. " + "".join(parts[:2])[:length], step)
        assert found.text.rstrip() == "Let me see.", length
    for text in ("a <", "5 < 6 [", "{", '{"city": "Rome"'):
        assert cut(calls, text, step).text == text


def test_reasoning_that_is_cut_off_has_no_markup() -> None:
    assert cut(HERMES, "<thi") == Delta()
    found = cut(HERMES, "<think>Hm.</thi")
    assert (found.reasoning, found.text) == ("Hm.", "")
    assert cut(None, "<think>a <").reasoning == "a <"


def test_what_a_model_itself_ended_stays_text() -> None:
    assert read(HERMES, "<tool_call>\n").text == "<tool_call>\n"
