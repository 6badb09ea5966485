"""Anthropic's dialect without a service: requests and what they are in the protocol, answers and what callers read."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from corolla.chassis.errors import (
    ContextLengthExceeded,
    CorollaError,
    InvalidRequest,
    MessageTooLarge,
    ModelNotFound,
    QueueFull,
    ScopeDenied,
    ServiceUnavailable,
    Unauthenticated,
    context_exceeded,
)
from corolla.client.held_bytes import HeldBytes
from corolla.http import message_replies
from corolla.http.errors import ANTHROPIC, OPENAI, Dialect, status_of
from corolla.http.exchange import Exchange, Limits
from corolla.http.foreign_fields import ignored_fields
from corolla.http.messages import CountTokensRequest, MessageRequest
from corolla.http.metrics import HttpMetrics
from corolla.v1 import generation_pb2 as pb

USER = {"role": "user", "content": "a"}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "b"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "c"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


THOUGHTS = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
]
CALLED = {"id": "t1", "name": "look", "arguments": '{"at":"b"}'}


def parsed(**body: Any) -> MessageRequest:
    return MessageRequest.model_validate_json(json.dumps({"messages": [USER], **body}))


def facts(message: Any) -> Any:
    return MessageToDict(message, preserving_proto_field_name=True)


@pytest.mark.parametrize(
    "messages, expected",
    [
        ([USER], [{"role": "user", "content": "a"}]),
        ([said("user", [])], [{"role": "user"}]),
        ([said("user", [text("a"), text("b")]), USER], [{"role": "user", "content_parts": ["a", "b", "a"]}]),
        (
            [
                USER,
                said("assistant", [*THOUGHTS, text("I look."), USE]),
                said("user", [RESULT, {**RESULT, "is_error": True, "content": [text("d")]}, text("e")]),
            ],
            [
                USER,
                said("assistant", "I look.", reasoning="hm", tool_calls=[CALLED]),
                said("tool", "c", tool_call_id="t1"),
                said("tool", "Error: d", tool_call_id="t1"),
                said("user", "e"),
            ],
        ),
        (
            [said("user", [{**RESULT, "content": None}, {"type": "tool_result", "tool_use_id": "t2"}])],
            [{"role": "tool", "tool_call_id": "t1"}, {"role": "tool", "tool_call_id": "t2"}],
        ),
        (
            [said("user", [{**RESULT, "content": [{"type": "tool_reference", "tool_name": "look"}]}])],
            [said("tool", "look", tool_call_id="t1")],
        ),
        ([USER, said("system", "b")], [USER, said("system", "b")]),
    ],
)
def test_a_conversation_in_the_protocol(messages: Any, expected: Any) -> None:
    assert facts(parsed(messages=messages).as_protocol())["messages"] == expected


@pytest.mark.parametrize(
    "system, expected",
    [("s", {"content": "s"}), ([text("s"), text("t")], {"content_parts": ["s", "t"]})],
)
def test_a_system_prompt_stands_in_front(system: Any, expected: Any) -> None:
    first, second = facts(parsed(system=system).as_protocol())["messages"]
    assert (first, second) == ({"role": "system", **expected}, USER)
    nothings: list[Any] = [None, "", []]
    for nothing in nothings:
        assert len(parsed(system=nothing).as_protocol().messages) == 1


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = {"role": "assistant", "content": "The"}
    assert parsed(messages=[USER, begun]).as_protocol().continue_last_message
    assert not parsed().as_protocol().continue_last_message


@pytest.mark.parametrize(
    "choice, expected, are_several",
    [
        (None, {}, True),
        ({"type": "auto"}, {"mode": "MODE_AUTO"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"mode": "MODE_AUTO"}, False),
        ({"type": "any"}, {"mode": "MODE_REQUIRED"}, True),
        ({"type": "none"}, {"mode": "MODE_NONE"}, True),
        ({"type": "tool", "name": "look"}, {"mode": "MODE_NAMED", "name": "look"}, True),
        (
            {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            {"mode": "MODE_NAMED", "name": "look"},
            False,
        ),
    ],
)
def test_tools_and_which_of_them_may_be_called(choice: Any, expected: Any, are_several: bool) -> None:
    request = parsed(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}], tool_choice=choice)
    asked = request.as_protocol()
    (tool,) = asked.tools
    assert facts(tool) == {"name": "look", "description": "Looks.", "parameters": '{"type":"object"}'}
    assert facts(asked.tool_choice) == expected
    assert asked.parallel_tool_calls is are_several
    assert len(ignored_fields(request)) == 1
    with pytest.raises(ValidationError):
        parsed(tools=[{"type": "function", "function": TOOL}])


@pytest.mark.parametrize(
    "body, is_on, arguments",
    [
        ({}, False, {}),
        ({"thinking": {"type": "disabled"}}, False, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True, {}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_is_what_a_template_asks_for(body: Any, is_on: bool, arguments: Any) -> None:
    request = parsed(**body)
    given = facts(request.as_protocol().template_arguments)
    assert given == {"enable_thinking": is_on, "thinking": is_on, **arguments}
    assert request.thinks is is_on


def test_other_options_in_the_protocol() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = parsed(
        model="m", max_tokens=5, stop_sequences=["x", "y"], temperature=0.5, top_k=3, top_p=0.9,
        metadata={"user_id": "u"}, output_config={"format": form}, stream=True,
    ).as_protocol()  # fmt: skip
    assert (request.model, request.stopping.max_tokens, list(request.stopping.stop)) == ("m", 5, ["x", "y"])
    assert facts(request.sampling) == {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    assert request.response_format.json_schema == '{"type":"object"}'
    assert request.continuous_usage
    assert parsed().as_protocol().sampling.temperature == 1


def test_what_is_counted_is_what_is_answered() -> None:
    asked: dict[str, Any] = {"messages": [USER], "system": "s", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    counted = CountTokensRequest.model_validate_json(json.dumps(asked)).as_protocol().chat
    answered = parsed(**asked).as_protocol()
    for field in counted.DESCRIPTOR.fields:
        assert getattr(counted, field.name) == getattr(answered, field.name), field.name


def test_what_is_ignored_is_named() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    request = parsed(
        messages=[{"role": "user", "content": [text("a", **marked)]}],
        system=[text("s", **marked)],
        tools=[{**TOOL, **marked}],
        thinking={"type": "enabled", "budget_tokens": 2000},
        metadata={"user_id": "u"},
        context_management={"edits": []},
    )
    named = {each.partition("[")[0].partition(".")[0] for each in ignored_fields(request)}
    assert named == {"messages", "system", "tools", "thinking", "context_management"}


@pytest.mark.parametrize("name, instead", [("stop", "stop_sequences"), ("reasoning_effort", "output_config.effort")])
def test_fields_of_other_dialects_are_refused(name: str, instead: str) -> None:
    with pytest.raises(InvalidRequest, match=instead):
        ignored_fields(parsed(**{name: "x"}))


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use"])
def test_what_no_model_reads_is_refused(kind: str) -> None:
    for block in ({"type": kind, "source": {}}, {**RESULT, "content": [{"type": kind, "source": {}}]}):
        with pytest.raises((ValidationError, InvalidRequest)):
            parsed(messages=[{"role": "user", "content": [block]}])


@pytest.mark.parametrize(
    "role, block",
    [("assistant", RESULT), ("user", USE), ("user", {"type": "thinking", "thinking": "a"}), ("system", RESULT)],
)
def test_blocks_stand_where_they_belong(role: str, block: Any) -> None:
    with pytest.raises(ValidationError):
        parsed(messages=[USER, {"role": role, "content": [block]}])


# --- answers ---------------------------------------------------------------------------------------------------------


def call(number: int, **given: str) -> pb.ChatChunk:
    return pb.ChatChunk(tool_calls=[pb.ToolCallDelta(index=number, **given)])


CHUNKS = (
    pb.ChatChunk(reasoning_delta="Hm", usage=pb.Usage(prompt_tokens=7, cached_tokens=3)),
    pb.ChatChunk(reasoning_delta="!"),
    pb.ChatChunk(text_delta="I "),
    pb.ChatChunk(text_delta="look."),
    call(0, id="t1", name="look", arguments_delta='{"at":'),
    call(0, arguments_delta='"b"}'),
    call(1, id="t2", name="look", arguments_delta="{}"),
    pb.ChatChunk(
        finish_reason=pb.FINISH_REASON_TOOL_CALLS,
        usage=pb.Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=9),
    ),
)
WHOLE = pb.ChatResponse(
    model="tiny",
    message=pb.ChatMessage(
        content="I look.",
        reasoning="Hm!",
        tool_calls=[
            pb.ToolCall(id="t1", name="look", arguments='{"at":"b"}'),
            pb.ToolCall(id="t2", name="look", arguments="{}"),
        ],
    ),
    finish_reason=pb.FINISH_REASON_TOOL_CALLS,
    usage=pb.Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=9),
)


async def events_of(*chunks: pb.ChatChunk, shows_thinking: bool = True) -> list[dict[str, Any]]:
    async def given() -> AsyncGenerator[pb.ChatChunk, None]:
        for chunk in chunks:
            own = pb.ChatChunk()
            own.CopyFrom(chunk)
            yield own

    found = message_replies.events(given(), "tiny", shows_thinking=shows_thinking)
    written = b"".join([part async for part in found]).decode()
    events = []
    for each in written.removesuffix("\n\n").split("\n\n"):
        name, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def reply_of(answer: pb.ChatResponse, *, shows_thinking: bool = True) -> Any:
    own = pb.ChatResponse()
    own.CopyFrom(answer)
    return message_replies.reply(own, shows_thinking=shows_thinking).model_dump()


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events, which have to come in their order."""
    begun, *middle, ended, stop = events
    assert (begun["type"], ended["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message, arguments, is_open = begun["message"], "", False
    assert message["content"] == []
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    for event in middle:
        blocks = message["content"]
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            arguments, is_open = "", True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        match event:
            case {"type": "content_block_stop"}:
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    assert blocks[-1]["input"] == {}
                    blocks[-1]["input"] = json.loads(arguments or "{}")
            case {"delta": {"type": "text_delta", "text": more}}:
                blocks[-1]["text"] += more
            case {"delta": {"type": "thinking_delta", "thinking": more}}:
                blocks[-1]["thinking"] += more
            case {"delta": {"type": "signature_delta", "signature": more}}:
                assert not blocks[-1]["signature"]
                blocks[-1]["signature"] = more
            case {"delta": {"type": "input_json_delta", "partial_json": more}}:
                arguments += more
            case _:
                pytest.fail(str(event))
    assert not is_open
    return {**message, **ended["delta"], "usage": ended["usage"]}


@pytest.mark.parametrize("shows_thinking", [True, False])
async def test_a_stream_adds_up_to_the_whole_reply(shows_thinking: bool) -> None:
    whole = reply_of(WHOLE, shows_thinking=shows_thinking)
    events = await events_of(*CHUNKS, shows_thinking=shows_thinking)
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert {**joined(events), "id": whole["id"]} == whole
    thoughts = [{"type": "thinking", "thinking": "Hm!", "signature": "unsigned"}]
    assert whole["content"] == [
        *thoughts * shows_thinking,
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "b"}},
        {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
    ]
    assert whole["usage"]["input_tokens"] == 4
    assert (whole["usage"]["cache_creation_input_tokens"], whole["usage"]["output_tokens"]) == (0, 9)


@pytest.mark.parametrize("reason", pb.FinishReason.values())
async def test_each_way_in_which_an_answer_ends_has_its_word(reason: "pb.FinishReason.ValueType") -> None:
    if reason == pb.FINISH_REASON_UNSPECIFIED:
        return
    sequence = "END" if reason == pb.FINISH_REASON_STOP_SEQUENCE else ""
    word = {
        pb.FINISH_REASON_EOS: "end_turn",
        pb.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
        pb.FINISH_REASON_TOOL_CALLS: "tool_use",
    }.get(reason, "max_tokens")
    whole = reply_of(pb.ChatResponse(finish_reason=reason, stop_sequence=sequence))
    streamed = joined(await events_of(pb.ChatChunk(finish_reason=reason, stop_sequence=sequence)))
    for found in (whole, streamed):
        assert (found["stop_reason"], found["stop_sequence"]) == (word, sequence or None)
        assert found["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize(
    "arguments, expected",
    [('{"at": "b', {"at": "b"}), ("", {}), ('{"at": nan}', {"INVALID_JSON": '{"at": nan}'})],
)
def test_arguments_that_are_not_whole(arguments: str, expected: Any) -> None:
    message = pb.ChatMessage(tool_calls=[pb.ToolCall(id="t1", name="look", arguments=arguments)])
    (block,) = reply_of(pb.ChatResponse(message=message, finish_reason=pb.FINISH_REASON_LENGTH))["content"]
    assert block["input"] == expected


@pytest.mark.parametrize(
    "error, status, kind",
    [
        (InvalidRequest("max_tokens", "must be at least 1"), 400, "invalid_request_error"),
        (Unauthenticated("who?"), 401, "authentication_error"),
        (ScopeDenied("no"), 403, "permission_error"),
        (ModelNotFound("none"), 404, "not_found_error"),
        (MessageTooLarge("large"), 413, "request_too_large"),
        (QueueFull("full"), 429, "rate_limit_error"),
        (CorollaError("broken"), 500, "api_error"),
        (ServiceUnavailable("away"), 503, "overloaded_error"),
        (context_exceeded(8, 9), 400, "invalid_request_error"),
        (context_exceeded(8, None), 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(error: CorollaError, status: int, kind: str) -> None:
    body = json.loads(ANTHROPIC.error_body(error, "req_1"))
    assert status_of(error) == status
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, "req_1")
    if isinstance(error, ContextLengthExceeded):
        assert body["error"]["message"].startswith("prompt is too long: ")
    assert json.loads(ANTHROPIC.error_body(context_exceeded(8, 9), ""))["error"]["message"] == (
        "prompt is too long: 9 tokens > 8 maximum"
    )


@pytest.mark.parametrize(
    "dialect, silence, kind", [(OPENAI, ": the answer is being prepared", ""), (ANTHROPIC, "event: ping", "error")]
)
async def test_silence_and_failures_in_a_stream_have_the_form_of_the_dialect(
    dialect: Dialect, silence: str, kind: str
) -> None:
    sent = ""
    is_silent = asyncio.Event()

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"").decode()
        if silence in sent:
            is_silent.set()

    async def answer() -> AsyncGenerator[bytes, None]:
        yield b"data: begun\n\n"
        await is_silent.wait()
        raise ServiceUnavailable("away")

    scope: Any = {"type": "http", "headers": [], "query_string": b""}
    unused: Any = None
    limits = Limits(0, HeldBytes(0), 9, 9, headers_after_s=0, comment_interval_s=0.001)
    metrics = HttpMetrics(CollectorRegistry(), unused)
    exchange = Exchange(scope, unused, send, limits, metrics, dialect)
    with pytest.raises(ServiceUnavailable) as failure:
        await exchange.stream(answer())
    await exchange.reply_error(failure.value)
    *_, last = [each for each in sent.split("\n\n") if each]
    name, data = last.split("\n")
    assert name == "event: error"
    failure_facts = json.loads(data.removeprefix("data: "))
    assert failure_facts.get("type", "") == kind
    assert failure_facts["error"]["message"] == "away"
