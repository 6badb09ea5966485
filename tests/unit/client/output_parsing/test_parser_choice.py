"""Answers are read from where the prompt has left off, by the table or by the checkpoint's response template."""

from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from corolla.client.generation.answer import Answer
from corolla.client.output_parsing.call_rules import CallRules
from corolla.client.output_parsing.deltas import Delta, joined
from corolla.client.output_parsing.formats import ReasoningFormat
from corolla.client.output_parsing.parser import State
from corolla.client.output_parsing.parser_choice import OutputFormat, OutputParsing, ResponseTemplateParser, beginning
from corolla.client.text.conversation import Tool, tool_values
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason, StopDecider
from corolla.v1.common_pb2 import ToolCall
from tests.chat_templates import MISTRAL, QWEN
from tests.checkpoints import make_tokenizer
from tests.conversations import message

THINK = ReasoningFormat("<think>", "</think>")
NOW = Tool("now", parameters={"type": "object", "properties": {"zone": {"type": "integer"}}})
RULES = CallRules((NOW,))
CALL = '{"name": "now", "arguments": {"zone": 1}}'


@pytest.mark.parametrize(
    "reasoning, tail, begun, expected",
    [
        (THINK, "assistant\n", None, State.BEGINNING),
        (THINK, "assistant\n<think>\n", None, State.INSIDE),
        (THINK, "<think>\n\n</think>\n\n", None, State.BEGINNING),
        (THINK, "It is", "It is", State.TEXT),
        (THINK, "", "", State.TEXT),
        (THINK, "<think>\nHm", "<think>\nHm", State.REASONING),
        (THINK, "<think>\n", "<think>\n", State.REASONING_BEGINNING),
        (THINK, "</think>\nIt", "<think>\nHm\n</think>\nIt", State.TEXT),
        (None, "<think>\n", None, State.BEGINNING),
        (None, "It is", "It is", State.TEXT),
    ],
)
def test_where_an_answer_begins(
    reasoning: ReasoningFormat | None, tail: str, begun: str | None, expected: State
) -> None:
    assert beginning(reasoning, tail, begun) is expected


def tokenizer_of(template: str, *special: str, **attributes: Any) -> TextTokenizer:
    hf_tokenizer: Any = make_tokenizer()
    hf_tokenizer.add_tokens(list(special), special_tokens=True)
    hf_tokenizer.chat_template = template
    for name, value in attributes.items():
        setattr(hf_tokenizer, name, value)
    return TextTokenizer(hf_tokenizer)


def answer_to(tokenizer: TextTokenizer, prompt: str, text: str, turn_name: str = "", **options: Any) -> Answer:
    """An answer of these tokens, that ends by itself."""
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)
    output_parsing = OutputParsing(OutputFormat.from_tokenizer(tokenizer), options.pop("rules", RULES), **options)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    decider = StopDecider(max_new_tokens=999, eos_token_ids=frozenset({end}))
    parser = output_parsing.parser(tokenizer, prompt_ids, turn_name)
    answer = Answer(tokenizer, prompt_ids, decider, (), parser, output_parsing.shown_ids([end]))
    for token_id in [*tokenizer.encode(text, add_special_tokens=False), end]:
        answer.accept(SampledToken(token_id), 0.0)
    delta = joined(answer.deltas())
    message = answer.message
    assert (delta.text, delta.reasoning) == (message.content, message.reasoning)
    assert delta.finish_reason is answer.finish_reason
    return answer


def test_an_answer_that_calls_tools_ends_for_that() -> None:
    tokenizer = tokenizer_of(QWEN)
    answer = answer_to(tokenizer, "Hi", f"<think>\nHm\n</think>\n\nWell.\n<tool_call>\n{CALL}\n</tool_call>", "a")
    (call,) = answer.message.tool_calls
    assert answer.message == message(
        "assistant", "Well.", "Hm", (ToolCall(id=call.id, name="now", arguments='{"zone": 1}'),)
    )
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    assert call.id.startswith("call_")
    # The same request made again has the same ids, and others have others.
    again = answer_to(tokenizer, "Hi", f"<tool_call>{CALL}</tool_call>", "a").message.tool_calls
    other = answer_to(tokenizer, "Hi", f"<tool_call>{CALL}</tool_call>").message.tool_calls
    assert again[0].id == call.id != other[0].id


def test_without_tools_calls_are_text() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    answer = answer_to(tokenizer_of(QWEN), "Hi", text, rules=CallRules())
    assert (answer.message, answer.finish_reason) == (message("assistant", text), FinishReason.EOS)


def test_marks_that_are_special_tokens_are_seen_and_all_others_skipped() -> None:
    tokenizer = tokenizer_of(MISTRAL, "[TOOL_CALLS]", "[INST]")
    answer = answer_to(tokenizer, "Hi", f"é[INST]你 [TOOL_CALLS][{CALL}]")
    (call,) = answer.message.tool_calls
    assert (answer.message.content, call.name, len(call.id)) == ("é你", "now", 9)
    assert call.id.isalnum()
    assert answer_to(tokenizer, "Hi", "a[TOOL_CALLS]b", rules=CallRules()).message.content == "ab"


def test_a_call_behind_its_name_is_seen_where_its_marks_are_special_tokens() -> None:
    template = "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}"
    tokenizer = tokenizer_of(template, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]")
    answer = answer_to(tokenizer, "Hi", 'é[INST]你 [TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{"zone": 1}')
    (call,) = answer.message.tool_calls
    assert (answer.message.content, call.name, call.arguments, len(call.id)) == ("é你", "now", '{"zone": 1}', 9)


TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "thinking": {"open": "<|begin|>think", "close": "<|begin|>said"},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@pytest.mark.parametrize(
    "text",
    [
        "Hi.",
        "<|begin|>thinkHm<|begin|>saidHi.",
        '<call:now>{"zone": 1}</call>',
        'Well: <call:now>{"zone": 1}</call><call:now>{}</call>',
    ],
)
def test_a_checkpoints_response_template_is_read_as_by_transformers(text: str) -> None:
    prefix = "<|user|>a<|assistant|>"
    expected = parse_response(text, TEMPLATE, prefix=prefix, tools=[tool_values(NOW)])
    for chunks in ([text], list(text)):
        parser = ResponseTemplateParser(TEMPLATE, prefix, [tool_values(NOW)], {"now"}, str)
        delta = joined([*map(parser.push, chunks), parser.finish()])
        parsed = {"content": delta.text.strip(), "thinking": delta.reasoning}
        assert {name: value for name, value in parsed.items() if value} == {
            name: value for name, value in expected.items() if name != "tool_calls"
        }
        assert [call.name for call in delta.calls] == ["now"] * len(expected.get("tool_calls", ()))


@pytest.mark.parametrize("text, kept", [("<call:now>{oh</call>", "{oh"), ('<call:rm>{"a": 1}</call>', '{"a": 1}')])
def test_calls_that_a_response_template_cannot_read_stay_text(text: str, kept: str) -> None:
    parser = ResponseTemplateParser(TEMPLATE, "", [], {"now"}, str)
    delta = joined([*map(parser.push, text), parser.push(" on"), parser.finish()])
    assert delta.calls == ()
    assert kept in delta.text
    assert delta.text.endswith(" on")


def test_an_answer_is_read_by_the_checkpoints_response_template() -> None:
    tokenizer = tokenizer_of(QWEN, response_template=TEMPLATE)
    answer = answer_to(tokenizer, "<|user|>a<|assistant|>", '<|begin|>thinkHm<|begin|>said<call:now>{"zone": 1}</call>')
    assert (answer.message.reasoning, answer.message.content) == ("Hm", "")
    assert [call.arguments for call in answer.message.tool_calls] == ['{"zone": 1}']
    assert answer.finish_reason is FinishReason.TOOL_CALLS
    # A grammar has calls written in a way of the table.
    required = CallRules((NOW,), is_required=True)
    by_table = answer_to(tokenizer, "a", f"<tool_call>\n{CALL}\n</tool_call>", rules=required)
    assert by_table.finish_reason is FinishReason.TOOL_CALLS


def test_no_deltas_join_to_an_empty_one() -> None:
    assert joined([]) == Delta()
