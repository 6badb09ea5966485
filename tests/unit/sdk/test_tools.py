"""Tools, calls and roles: as requests from what callers have, and as plain values from what the service answers."""

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.client import Client
from corolla.sdk.requests import chat_request, tokenize_request
from corolla.sdk.results import FinishReason, Message, ToolCall
from corolla.v1 import generation_pb2 as pb
from tests.generation_server import GenerationServer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS, "strict": True}


class Weather(BaseModel):
    """The weather."""

    city: str


@dataclass
class Clock:
    zone: int = 0


@pytest.mark.parametrize(
    "tool", [{"type": "function", "function": FUNCTION}, FUNCTION, {**FUNCTION, "type": "function"}]
)
def test_tools_are_mappings_as_others_write_them(tool: Any) -> None:
    (added,) = chat_request([], {"tools": [tool]}).tools
    assert (added.name, added.description, added.strict) == ("get_weather", "The weather.", True)
    assert added.parameters == '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'


def test_tools_are_classes_of_fields() -> None:
    weather, clock = chat_request([], {"tools": [Weather, Clock]}).tools
    assert (weather.name, weather.description, clock.name, clock.description) == (
        "Weather",
        "The weather.",
        "Clock",
        "",
    )
    assert '"required": ["city"]' in weather.parameters
    assert '"zone": {"default": 0' in clock.parameters


@pytest.mark.parametrize(
    "tools, field",
    [
        ("get_weather", "tools"), (FUNCTION, "tools"), (["get_weather"], "tools[0]"), ([int], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"), ([{"name": 5}], "tools[0].name"),
        ([{"name": "a", "nam": "b"}], "tools[0]"),
        ([{"name": "a", "parameters": {"a": object()}}], "tools[0].parameters"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused(tools: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request([], {"tools": tools})
    assert [name for name, _ in refused.value.violations] == [field]


@pytest.mark.parametrize(
    "choice, mode, name",
    [
        ("none", pb.ToolChoice.MODE_NONE, ""),
        ("auto", pb.ToolChoice.MODE_AUTO, ""),
        ("required", pb.ToolChoice.MODE_REQUIRED, ""),
        ({"type": "function", "function": {"name": "now"}}, pb.ToolChoice.MODE_NAMED, "now"),
        ({"type": "function", "name": "now"}, pb.ToolChoice.MODE_NAMED, "now"),
        (Weather, pb.ToolChoice.MODE_NAMED, "Weather"),
    ],
)
def test_a_choice_is_a_word_or_a_tool(choice: Any, mode: Any, name: str) -> None:
    request = chat_request([], {"tool_choice": choice, "parallel_tool_calls": False})
    assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)
    assert request.HasField("parallel_tool_calls")
    with pytest.raises(InvalidRequest, match="tool_choice"):
        chat_request([], {"tool_choice": "perhaps"})


def test_messages_have_all_that_others_write() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        Message("assistant", "", (ToolCall("c2", "now", "{}"),), reasoning="hm"),
        Message("user", ("a", "b")),
    ]
    user, assistant, tool, other, parts = chat_request(messages, {}).messages
    assert (list(user.content_parts), user.name) == (["a", "b"], "ann")
    assert assistant.tool_calls[0] == pb.ToolCall(id="c1", name="now", arguments="{}")
    assert (assistant.reasoning, other.reasoning, other.tool_calls[0].id) == ("hm", "hm", "c2")
    assert (tool.role, tool.tool_call_id, list(parts.content_parts)) == ("tool", "c1", ["a", "b"])


@pytest.mark.parametrize(
    "message, field",
    [
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": ["now"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_request([message], {})
    assert [name for name, _ in refused.value.violations] == [field]


def test_options_of_conversations_have_their_fields() -> None:
    arguments = {"enable_thinking": False, "n": [1, {"a": None}]}
    request = chat_request([], {"n": 2, "continue_last_message": True, "template_arguments": arguments})
    assert (request.num_completions, request.continue_last_message) == (2, True)
    assert request.template_arguments["enable_thinking"] is False
    tokenized = tokenize_request([Message("user", "a")], tools=[Clock], template_arguments=arguments)
    assert (tokenized.chat.tools[0].name, len(tokenized.chat.template_arguments)) == ("Clock", 2)
    for wrong in ({"a": object()}, 5):
        with pytest.raises(InvalidRequest, match="template_arguments"):
            chat_request([], {"template_arguments": wrong})  # type: ignore[typeddict-item]


def test_calls_and_reasoning_come_whole_and_in_parts(server: GenerationServer) -> None:
    calls = (ToolCall("c0", "Weather", '{"a": 1}'), ToolCall("c1", "Clock", '{"a": 1}'))
    with Client(server.address) as client:
        reply = client.complete_chat([Message("user", "a")], tools=[Weather, Clock], n=2)
        assert reply.message == Message("assistant", "", calls, reasoning="hm")
        assert reply.finish_reason is FinishReason.TOOL_CALLS
        assert [(other.index, other.text) for other in reply.others] == [(1, "or")]
        with client.stream_chat([Message("user", "a")], tools=[Weather, Clock]) as stream:
            chunks = list(stream)
        assert stream.message == reply.message
        assert [delta.arguments for chunk in chunks for delta in chunk.tool_calls] == ['{"a": ', "1}"] * 2
        with client.chat(system="s", tools=[Weather]) as chat:
            called = chat.send("a")
            results = [Message("tool", "blue", tool_call_id=call.id) for call in called.tool_calls]
            assert chat.send(results).text == "blue"
    assert [message.role for message in server.servicer.requests[-1].messages] == ["tool"]
