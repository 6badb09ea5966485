"""`/v1/chat/completions`: replies and events of streams."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel, Field

from corolla.http.answers import (
    DONE,
    FINISH_REASONS,
    CompletionUsage,
    compact,
    escaped,
    ids_text,
    new_id,
    now_s,
    usage_of,
)
from corolla.http.log_probabilities import logprob_facts, logprob_texts
from corolla.v1 import generation_pb2 as pb

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    name: str
    arguments: str


class AnsweredToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnsweredMessage(BaseModel):
    """An assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = Field(None, description="What the model thought, where it marks that.")
    refusal: None = None
    tool_calls: list[AnsweredToolCall] | None = None


class Choice(BaseModel):
    index: int
    message: AnsweredMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage


def message_of(message: pb.ChatMessage) -> AnsweredMessage:
    calls = [
        AnsweredToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    return AnsweredMessage(
        content=message.content or (None if calls else ""),
        reasoning_content=message.reasoning or None,
        tool_calls=calls or None,
    )


async def reply(response: pb.ChatResponse, *, has_logprobs: bool, has_token_ids: bool) -> AsyncGenerator[str, None]:
    """The pieces of a reply that is not streamed, a `ChatCompletion`."""
    facts = {"id": new_id("chatcmpl-"), "object": "chat.completion", "created": now_s(), "model": response.model}
    yield compact(facts)[:-1] + ',"choices":['
    answers: Sequence[pb.ChatResponse | pb.ChatCompletion] = (response, *response.others)
    for index, each in enumerate(answers):
        message = message_of(each.message).model_dump_json()
        yield f'{"," if index else ""}{{"index":{index},"message":{message},"logprobs":'
        if has_logprobs:
            yield '{"content":['
            async for piece in logprob_texts(each.logprobs):
                yield piece
            yield '],"refusal":null}'
        else:
            yield "null"
        token_ids = ids_text(each.token_ids) if has_token_ids else "null"
        yield f',"finish_reason":{compact(FINISH_REASONS[each.finish_reason])},"token_ids":{token_ids}}}'
    yield f'],"usage":{usage_of(response.usage).model_dump_json()}}}'


async def events(
    chunks: AsyncGenerator[pb.ChatChunk, None],
    model: str,
    *,
    has_usage: bool,
    has_continuous_usage: bool = False,
    has_logprobs: bool,
    has_token_ids: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: a role, deltas, an end for each answer, the usage if it is wanted, and `[DONE]`."""
    facts = {"id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": now_s(), "model": model}
    no_usage = ',"usage":null' if has_usage and not has_continuous_usage else ""
    head = "data: " + compact(facts)[:-1] + no_usage + ',"choices":[{"index":'
    begun: set[int] = set()
    counted = pb.Usage()
    async with aclosing(chunks):
        async for chunk in chunks:
            text, tail = "", "}]}\n\n"
            if has_continuous_usage:
                tail = f'}}],"usage":{compact(usage_of(chunk.usage).model_dump())}}}\n\n'
            if chunk.index not in begun:
                begun.add(chunk.index)
                delta = '{"role":"assistant","content":""}'
                text += f'{head}{chunk.index},"delta":{delta},"logprobs":null,"finish_reason":null{tail}'
            delta = _delta(chunk)
            more = _more(chunk, has_logprobs, has_token_ids)
            reason = FINISH_REASONS[chunk.finish_reason]
            if delta or more:
                logprobs = "" if has_logprobs and chunk.logprobs else ',"logprobs":null'
                text += f'{head}{chunk.index},"delta":{{{delta}}}{logprobs}{more},"finish_reason":null{tail}'
            if reason is not None:
                text += f'{head}{chunk.index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"{tail}'
            if chunk.HasField("usage"):
                counted = chunk.usage
            if text:
                yield text.encode()
    if has_usage:
        yield f"data: {compact({**facts, 'choices': [], 'usage': usage_of(counted).model_dump()})}\n\n".encode()
    yield DONE


def _delta(chunk: pb.ChatChunk) -> str:
    delta = f'"content":{escaped(chunk.text_delta)}' if chunk.text_delta else ""
    if chunk.reasoning_delta:
        delta += f'{"," if delta else ""}"reasoning_content":{escaped(chunk.reasoning_delta)}'
    if chunk.tool_calls:
        calls = compact([_call_delta(call) for call in chunk.tool_calls])
        delta += f'{"," if delta else ""}"tool_calls":{calls}'
    return delta


def _call_delta(call: pb.ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments_delta}
    if not call.id:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _more(chunk: pb.ChatChunk, has_logprobs: bool, has_token_ids: bool) -> str:
    text = ""
    if has_logprobs and chunk.logprobs:
        text += f',"logprobs":{compact({"content": logprob_facts(chunk.logprobs), "refusal": None})}'
    if has_token_ids and chunk.token_ids:
        text += f',"token_ids":{ids_text(chunk.token_ids)}'
    return text
