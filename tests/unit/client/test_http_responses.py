"""Events of streamed responses, made of chunks that no model has to give."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from corolla.client.http import chat_replies, completions
from corolla.client.http.response_replies import Reply
from corolla.client.http.responses import ResponseRequest
from corolla.v1 import generation_pb2 as pb


async def events_of(*chunks: pb.ChatChunk) -> list[dict[str, Any]]:
    async def given() -> AsyncGenerator[pb.ChatChunk, None]:
        for chunk in chunks:
            yield chunk

    reply = Reply(ResponseRequest.model_validate({"input": "Where?"}), "resp_1", "tiny")
    text = "".join([part.decode() async for part in reply.events(given())])
    return [json.loads(each.partition("\ndata: ")[2]) for each in text.split("\n\n") if each]


def called(number: int, **facts: str) -> pb.ChatChunk:
    return pb.ChatChunk(tool_calls=[pb.ToolCallDelta(index=number, **facts)])


async def test_each_item_of_a_stream_has_its_place_in_the_output() -> None:
    found = await events_of(
        pb.ChatChunk(reasoning_delta="Hm"),
        pb.ChatChunk(text_delta="I ask."),
        called(0, id="call_1", name="weather"),
        called(0, arguments_delta="{}"),
        called(1, id="call_2", name="weather", arguments_delta="[]"),
        pb.ChatChunk(finish_reason=pb.FINISH_REASON_TOOL_CALLS),
    )
    added = [each for each in found if each["type"] == "response.output_item.added"]
    assert [each["output_index"] for each in added] == [0, 1, 2, 3]
    output = found[-1]["response"]["output"]
    places = {each["id"]: place for place, each in enumerate(output)}
    assert [each["type"] for each in output] == ["reasoning", "message", "function_call", "function_call"]
    for each in found:
        if "output_index" in each:
            assert each["output_index"] == places[each["item_id"] if "item_id" in each else each["item"]["id"]]


LINE_ENDS = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\r\nh"
CALL = pb.ToolCallDelta(id="call_1", name="weather", arguments_delta=LINE_ENDS)


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
async def test_no_text_ends_a_line_of_events_whatever_its_reader_takes_for_one(kind: str) -> None:
    """`str.splitlines`, with which httpx makes lines, knows more ends than the standard of events does."""
    chunk = pb.ChatChunk(text_delta=LINE_ENDS, reasoning_delta=LINE_ENDS, tool_calls=[CALL])
    last = pb.ChatChunk(finish_reason=pb.FINISH_REASON_EOS)

    async def chats() -> AsyncGenerator[pb.ChatChunk, None]:
        yield chunk
        yield last

    async def texts() -> AsyncGenerator[tuple[int, pb.GenerateChunk], None]:
        yield 0, pb.GenerateChunk(text_delta=LINE_ENDS)
        yield 0, pb.GenerateChunk(finish_reason=pb.FINISH_REASON_EOS)

    wishes = {"has_usage": False, "has_logprobs": False, "has_token_ids": False}
    events = {
        "chat": lambda: chat_replies.events(chats(), "tiny", **wishes),
        "completion": lambda: completions.events(texts(), "tiny", 1, **wishes),
        "response": lambda: Reply(ResponseRequest.model_validate({"input": "Hi"}), "resp_1", "tiny").events(chats()),
    }[kind]()
    text = b"".join([part async for part in events]).decode()
    lines = [each for each in text.splitlines() if each]
    assert lines == [each for each in text.split("\n") if each]
    values = [json.loads(each.removeprefix("data: ")) for each in lines if each.startswith("data: {")]
    assert LINE_ENDS in strings_of(values)


def strings_of(value: Any) -> list[str]:
    """All strings of a value of JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for each in value for text in strings_of(each)]
    return [value] if isinstance(value, str) else []
