"""Tools that must be called are, whatever the model: a tiny one of random weights, in streams and in sessions."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from corolla.chassis.channels import open_channel
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

"""The context has room for tools, which the tiny tokenizer takes letter by letter."""

WEATHER = pb.Tool(
    name="get_weather",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        }
    ),
)
NOW = pb.Tool(name="now")
QUESTION = pb.ChatMessage(role="user", content="How is the weather?")
REQUIRED = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)


swarm = tiny_swarm(["0:2", "2:5"], context_length=4096)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(swarm: Swarm) -> AsyncIterator[Any]:
    async with open_channel(swarm.address) as channel:
        yield GenerationServiceStub(channel)


def a_chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**{"messages": [QUESTION], "tools": [WEATHER, NOW], "tool_choice": REQUIRED, **fields})


def check(calls: Any, most: int = 99) -> None:
    assert 1 <= len(calls) <= most
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == "get_weather":
            assert arguments["city"] in ("Paris", "Rome")
            assert arguments["days"] <= 9
        else:
            assert (call.name, arguments) == ("now", {})


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
async def test_required_calls_fit_their_schemas(stub: Any, seed: int | None) -> None:
    sampling = pb.SamplingParameters() if seed is None else pb.SamplingParameters(temperature=1.0, seed=seed)
    request = a_chat(sampling=sampling, parallel_tool_calls=False, stopping=pb.StoppingParameters(max_tokens=300))
    reply = await stub.Chat(request)
    assert reply.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert reply.message.content == ""
    check(reply.message.tool_calls, most=1)
    chunks = [chunk async for chunk in stub.ChatStream(request)]
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert [delta.name for delta in deltas if delta.id] == [reply.message.tool_calls[0].name]
    assert "".join(delta.arguments_delta for delta in deltas) == reply.message.tool_calls[0].arguments
    assert chunks[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS


async def test_a_named_tool_is_called_and_its_result_is_answered(stub: Any) -> None:
    session_id = (await stub.CreateSession(pb.CreateSessionRequest())).session_id
    named = pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name="now")
    first = await stub.Chat(a_chat(session_id=session_id, tool_choice=named))
    (call,) = first.message.tool_calls
    assert (call.name, call.arguments) == ("now", "{}")
    result = pb.ChatMessage(role="tool", content="noon", tool_call_id=call.id)
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    short = pb.StoppingParameters(max_tokens=5, ignore_eos=True)
    second = await stub.Chat(a_chat(session_id=session_id, messages=[result], tool_choice=none, stopping=short))
    assert second.message.tool_calls == []
    assert len(second.token_ids) == 5
