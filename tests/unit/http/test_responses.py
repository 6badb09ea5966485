"""Events of streamed responses, made of chunks that no model has to give."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from corolla.chassis.errors import InvalidRequest
from corolla.http import chat_replies, completions
from corolla.http.response_replies import Reply, input_items
from corolla.http.responses import ItemsQuery, ResponseRequest
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2


async def events_of(*chunks: pb.ChatChunk) -> list[dict[str, Any]]:
    async def given() -> AsyncGenerator[pb.ChatChunk, None]:
        for chunk in chunks:
            yield chunk

    reply = Reply(ResponseRequest.model_validate({"input": "Where?"}), "resp_1", "tiny")
    return parsed(b"".join([part async for part in reply.events(given())]))


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


def parsed(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(each.partition("\ndata: ")[2]) for each in text.decode().split("\n\n") if each]


async def test_a_replay_goes_on_behind_any_event_however_the_answer_was_divided() -> None:
    chunks = [
        pb.ChatChunk(reasoning_delta="H"), pb.ChatChunk(reasoning_delta="m."), pb.ChatChunk(text_delta="I "),
        pb.ChatChunk(text_delta="ask \U0001f600"), called(0, id="call_1", name="weather", arguments_delta='{"a'),
        called(0, arguments_delta='":1}'), pb.ChatChunk(finish_reason=pb.FINISH_REASON_TOOL_CALLS),
    ]  # fmt: skip
    found = await events_of(*chunks)
    message = pb.ChatMessage(role="assistant", reasoning="Hm.", content="I ask \U0001f600")
    message.tool_calls.add(id="call_1", name="weather", arguments='{"a":1}')
    answer = pb.ChatResponse(message=message, finish_reason=pb.FINISH_REASON_TOOL_CALLS)
    reply = Reply(ResponseRequest.model_validate({"input": "Where?"}), "resp_1", "tiny")

    async def replayed(after: int = -1) -> list[dict[str, Any]]:
        return parsed(b"".join([part async for part in reply.replayed(answer, after)]))

    assert [each["type"] for each in await replayed() if "delta" not in each] == [
        each["type"] for each in found if "delta" not in each
    ]
    for number, last in enumerate(found):
        seen = found[: number + 1]
        rest = await replayed(last["sequence_number"])
        assert not {each["sequence_number"] for each in seen} & {each["sequence_number"] for each in rest}
        for item in found[-1]["response"]["output"]:
            texts = [each["delta"] for each in [*seen, *rest] if each.get("item_id") == item["id"] and "delta" in each]
            assert "".join(texts) == item.get("arguments", (item.get("content") or [{}])[0].get("text"))
        if rest:
            # What the events say at their end does not depend on where the replay begins.
            assert rest[-1]["response"]["output"] == found[-1]["response"]["output"]
    whole = "".join([piece async for piece in reply.whole(answer)])
    assert json.loads(whole)["output"] == found[-1]["response"]["output"]


@pytest.mark.parametrize(
    "request_body, lost",
    [
        ({"metadata": {"run": "7"}, "temperature": 0.5, "instructions": "Be brief."}, set()),
        ({"tools": [{"type": "function", "name": "a", "description": "x" * 3000}], "instructions": "a"}, {"tools"}),
        ({"instructions": "x" * 3000, "metadata": {"run": "7"}}, {"instructions"}),
        ({"metadata": {"run": "x" * 3000}}, {"metadata"}),
    ],
)
def test_a_stored_response_keeps_the_options_that_fit(request_body: Any, lost: set[str]) -> None:
    first = Reply(ResponseRequest.model_validate({"input": "a", **request_body}), "resp_1", "tiny")
    first.head = first.head.model_copy(update={"created_at": 7, "previous_response_id": "resp_0"})
    again = Reply.of_turn("resp_1", router_pb2.FinishedTurn(note=first.note, ended_s=9), "other")
    assert len(first.note) <= 2048
    changed = {name for name, value in again.head if value != getattr(first.head, name)}
    assert changed == lost


def test_items_before_a_response_come_in_pages() -> None:
    messages = [
        pb.ChatMessage(role="system", content="a"),
        pb.ChatMessage(role="user", content_parts=["b", "c"]),
        pb.ChatMessage(role="assistant", reasoning="d", content="e"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments="{}")]),
        pb.ChatMessage(role="tool", tool_call_id="1", content="g"),
    ]
    items = input_items(messages, "resp_1")
    kinds = ["message", "message", "reasoning", "message", "function_call", "function_call_output"]
    assert [each["type"] for each in items] == kinds
    for order in ("asc", "desc"):
        read: list[Any] = []
        more = True
        while more:
            after = {"after": read[-1]["id"]} if read else {}
            page, more = ItemsQuery.model_validate({"limit": 4, "order": order, **after}).page(items)
            read += page
        assert read == (items if order == "asc" else items[::-1])
    with pytest.raises(InvalidRequest):
        ItemsQuery.model_validate({"after": "msg_none"}).page(items)


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

    options = {"has_usage": False, "has_logprobs": False, "has_token_ids": False}
    events = {
        "chat": lambda: chat_replies.events(chats(), "tiny", **options),
        "completion": lambda: completions.events(texts(), "tiny", 1, **options),
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
