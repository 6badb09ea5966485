"""Events of streamed responses, made of chunks that no model has to give."""

import json
from collections.abc import AsyncGenerator
from typing import Any

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
