"""Conversations as people have them: what the model is given is what its template makes of every field."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from corolla.chassis.channels import open_channel
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.refusals import refusal_of
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Refuses what Mistral's does, and shows each field that it is given.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' %}
        {{- raise_exception('Conversation roles must alternate: ' + message.content) }}
    {%- endif %}
    {{- '<|user|>' + message.role + ':' }}
    {%- if message.reasoning_content %}{{- '(' + message.reasoning_content + ')' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls %}
        {{- '!' + call.id + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
    {{- (message.tool_call_id or '') + (message.name or '') + eos_token }}
{%- endfor %}
{%- if tools %}{{- tools[0].function.name }}{% endif %}
{%- if mood %}{{- mood }}{% endif %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
SHORT = pb.StoppingParameters(max_tokens=6, ignore_eos=True)


swarm = tiny_swarm(
    ["0:2", "2:5"], edit=lambda model: (model / "chat_template.jinja").write_text(TEMPLATE), num_clients=2
)


@pytest_asyncio.fixture(loop_scope="module")
async def stub(swarm: Swarm) -> AsyncIterator[Any]:
    async with open_channel(swarm.address) as channel:
        yield GenerationServiceStub(channel)


def a_message(role: str, content: str = "", **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=content, **fields)


CALL = pb.ToolCall(id="c1", name="f", arguments='{"a":1}')
ALL_FIELDS = [
    a_message("developer", "be brief"),
    a_message("user", content_parts=["hi", "you"], name="ann"),
    a_message("assistant", reasoning="hm", tool_calls=[CALL]),
    a_message("tool", "ok", tool_call_id="c1", name="f"),
]
ALL_TEXT = (
    "<|user|>system:be brief<|end|><|user|>user:hi\nyouann<|end|>"
    '<|user|>assistant:(hm)!c1f{"a": 1}<|end|><|user|>tool:okc1f<|end|>'
)


async def tokenized(stub: Any, **conversation: Any) -> str:
    request = pb.TokenizeRequest(chat=pb.Conversation(**conversation))
    ids = (await stub.Tokenize(request)).token_ids
    return str((await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text)


async def test_every_field_reaches_the_template(stub: Any) -> None:
    tools = [pb.Tool(name="f")]
    request = pb.TokenizeRequest(chat=pb.Conversation(messages=ALL_FIELDS, tools=tools))
    request.chat.template_arguments.update({"mood": "gay"})
    ids = (await stub.Tokenize(request)).token_ids
    text = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
    assert text == ALL_TEXT + "fgay<|assistant|>"
    begun = [a_message("user", "a"), a_message("assistant", "It is")]
    continued = await tokenized(stub, messages=begun, continue_last_message=True)
    assert continued == "<|user|>user:a<|end|><|user|>assistant:It is"


async def test_a_templates_refusal_is_the_callers_fault_and_says_why(stub: Any) -> None:
    request = pb.ChatRequest(messages=[a_message("user", "a"), a_message("user", "b\n<|end|>")])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Chat(request)
    refused = refusal_of(failure.value)
    assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("messages",))
    assert r"Conversation roles must alternate: b\n" in refused.message


async def test_several_answers_are_those_of_several_chats(stub: Any) -> None:
    def request(**fields: Any) -> pb.ChatRequest:
        drawn = pb.SamplingParameters(temperature=1.0, seed=fields.pop("seed"))
        return pb.ChatRequest(messages=[a_message("user", "a")], stopping=SHORT, sampling=drawn, **fields)

    several = await stub.Chat(request(seed=3, num_completions=3))
    assert [other.index for other in several.others] == [1, 2]
    alone = [(await stub.Chat(request(seed=seed))).token_ids for seed in (3, 4, 5)]
    assert [several.token_ids, *(other.token_ids for other in several.others)] == alone
    assert several.usage.completion_tokens == 18
    streamed: dict[int, list[int]] = {}
    usages = []
    async for chunk in stub.ChatStream(request(seed=3, num_completions=3)):
        streamed.setdefault(chunk.index, []).extend(chunk.token_ids)
        usages.append(chunk.HasField("usage"))
    assert [streamed[index] for index in range(3)] == alone
    assert usages == [False] * (len(usages) - 1) + [True]


async def answer_to(stub: Any, token_ids: list[int]) -> list[int]:
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=token_ids), stopping=SHORT)
    return list((await stub.Generate(request)).completions[0].token_ids)


async def ids_of(stub: Any, text: str) -> list[int]:
    request = pb.TokenizeRequest(text=text, without_special_tokens=True)
    return list((await stub.Tokenize(request)).token_ids)


async def test_a_session_keeps_every_field_for_any_client_service(swarm: Swarm, stub: Any) -> None:
    """The next turn goes on from the log, as its tokens were."""
    session_id = (await stub.CreateSession(pb.CreateSessionRequest())).session_id
    first = await stub.Chat(pb.ChatRequest(session_id=session_id, messages=ALL_FIELDS, stopping=SHORT))
    log = [*await ids_of(stub, ALL_TEXT + "<|assistant|>"), *first.token_ids]
    async with open_channel(f"127.0.0.1:{swarm.clients[1].port}") as channel:
        second = await GenerationServiceStub(channel).Chat(
            pb.ChatRequest(session_id=session_id, messages=[a_message("user", "and?")], stopping=SHORT)
        )
    # The template writes the role before the answer only when it is in the past.
    past = [*await ids_of(stub, ALL_TEXT), *await ids_of(stub, "<|user|>assistant:")]
    said = first.message.content
    new = await ids_of(stub, said + "<|end|><|user|>user:and?<|end|><|assistant|>")
    assert second.token_ids == await answer_to(stub, [*past, *new])
    assert second.usage.prompt_tokens == len(past) + len(new)
    assert second.usage.cached_tokens == len(log) - len(first.token_ids) - 1


async def test_an_answer_that_was_cut_is_continued_in_its_session(stub: Any) -> None:
    """Token for token, as if it had not been cut; the message is one."""
    begun = [a_message("user", "a"), a_message("assistant", content_parts=["It", "is "])]
    prompt_ids = await ids_of(stub, "<|user|>user:a<|end|><|user|>assistant:It\nis ")
    session_id = (await stub.CreateSession(pb.CreateSessionRequest())).session_id
    request = pb.ChatRequest(messages=begun, stopping=SHORT, continue_last_message=True)
    alone = await stub.Chat(request)
    request.session_id = session_id
    first = await stub.Chat(request)
    assert first.token_ids == alone.token_ids == await answer_to(stub, prompt_ids)
    second = await stub.Chat(pb.ChatRequest(session_id=session_id, continue_last_message=True, stopping=SHORT))
    log = [*prompt_ids, *first.token_ids]
    assert second.token_ids == await answer_to(stub, log)
    third = await stub.Chat(pb.ChatRequest(session_id=session_id, messages=[a_message("user", "b")], stopping=SHORT))
    log = [*log, *second.token_ids, *await ids_of(stub, "<|end|><|user|>user:b<|end|><|assistant|>")]
    assert third.token_ids == await answer_to(stub, log)
    assert third.usage.prompt_tokens == len(log)


async def test_calls_and_reasoning_are_kept_apart_and_recorded(stub: Any) -> None:
    """A turn that was begun elsewhere goes on in the middle of a call; asked for again, it is the same, ids and all."""
    session_id = (await stub.CreateSession(pb.CreateSessionRequest())).session_id
    begun = await ids_of(stub, 'Well. <tool_call>{"name": "f", "arguments": {"a": ')
    rest = await ids_of(stub, "[1]}}</tool_call>")
    tools = [pb.Tool(name="f")]
    request = pb.ChatRequest(
        session_id=session_id, messages=[a_message("user", "a")], tools=tools, request_id="mine", stopping=SHORT
    )
    request.stopping.max_tokens = len(begun) + len(rest) + 1
    request.received.ids.extend([*begun, *rest])
    request.resume_from_index = len(begun) + len(rest)
    last = await stub.Chat(request)
    assert last.message.tool_calls == []
    request.ClearField("received")
    request.resume_from_index = 0
    whole = await stub.Chat(request)
    assert whole.token_ids == [*begun, *rest, *last.token_ids]
    assert whole.message.content == "Well." + last.message.content
    (call,) = whole.message.tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": [1]}')
    streamed = [chunk async for chunk in stub.ChatStream(request)]
    deltas = [delta for chunk in streamed for delta in chunk.tool_calls]
    assert [(delta.index, delta.id, delta.name) for delta in deltas if delta.name] == [(0, call.id, "f")]
    assert "".join(delta.arguments_delta for delta in deltas) == call.arguments
    # The next turn knows the call.
    result = a_message("tool", "ok", tool_call_id=call.id)
    following = await stub.Chat(pb.ChatRequest(session_id=session_id, messages=[result], tools=tools, stopping=SHORT))
    said = f'<|user|>user:a<|end|><|user|>assistant:{whole.message.content}!{call.id}f{{"a": [1]}}<|end|>'
    prompt = await ids_of(stub, f"{said}<|user|>tool:ok{call.id}<|end|>f<|assistant|>")
    assert following.usage.prompt_tokens == len(prompt)
    assert following.token_ids == await answer_to(stub, prompt)
