"""Turns the service's messages into values of `corolla.sdk.results`."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from corolla.sdk import results
from corolla.v1 import generation_pb2 as pb

Value = TypeVar("Value")

_FINISH_REASONS: dict[int, results.FinishReason] = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in results.FinishReason
}


def usage(message: pb.Usage) -> results.Usage:
    return _value(
        results.Usage,
        message,
        stall_s=message.stall_seconds,
        time_to_first_token_s=message.time_to_first_token_seconds,
        total_s=message.total_seconds,
        may_differ_from_token=message.may_differ_from_token if message.HasField("may_differ_from_token") else None,
    )


def generation(message: pb.GenerateResponse, ignored: tuple[str, ...] = ()) -> results.Generation:
    completions = tuple(_completion(each, each.text) for each in message.completions)
    prompt = None
    if message.HasField("prompt"):
        echoed = message.prompt
        prompt = results.EchoedPrompt(echoed.text, tuple(echoed.token_ids), _logprobs(echoed.logprobs))
    return results.Generation(message.model, completions, usage(message.usage), prompt, ignored)


def score(message: pb.ScoreResponse) -> results.Score:
    return results.Score(
        message.model, message.logprob, message.is_greedy, _logprobs(message.logprobs), usage(message.usage)
    )


def embedding(message: pb.EmbedResponse) -> results.Embedding:
    return results.Embedding(message.model, tuple(message.embedding), usage(message.usage))


def reply(message: pb.ChatResponse, ignored: tuple[str, ...] = ()) -> results.Reply:
    return results.Reply(
        model=message.model,
        text=message.message.content,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        usage=usage(message.usage),
        reasoning=message.message.reasoning,
        tool_calls=_tool_calls(message.message),
        others=tuple(
            _completion(each, each.message.content, each.message.reasoning, _tool_calls(each.message))
            for each in message.others
        ),
        ignored=ignored,
    )


def _completion(
    message: pb.Completion | pb.ChatCompletion,
    text: str,
    reasoning: str = "",
    tool_calls: tuple[results.ToolCall, ...] = (),
) -> results.Completion:
    return results.Completion(
        index=message.index,
        text=text,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        reasoning=reasoning,
        tool_calls=tool_calls,
    )


def _tool_calls(message: pb.ChatMessage) -> tuple[results.ToolCall, ...]:
    return tuple(results.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)


def chunk(message: pb.GenerateChunk | pb.ChatChunk) -> results.Chunk:
    reasoning, calls = "", tuple[results.ToolCallDelta, ...]()
    if isinstance(message, pb.ChatChunk):
        reasoning, calls = message.reasoning_delta, tuple(map(_call_delta, message.tool_calls))
    return results.Chunk(
        index=message.index,
        text=message.text_delta,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        usage=usage(message.usage) if message.HasField("usage") else None,
        reasoning=reasoning,
        tool_calls=calls,
    )


def _call_delta(message: pb.ToolCallDelta) -> results.ToolCallDelta:
    return results.ToolCallDelta(message.index, message.id, message.name, message.arguments_delta)


def tokens(message: pb.TokenizeResponse) -> results.Tokens:
    return results.Tokens(tuple(message.token_ids), tuple(message.tokens))


def model(message: pb.Model) -> results.Model:
    return _value(results.Model, message)


def session(message: pb.Session) -> results.SessionInfo:
    return _value(results.SessionInfo, message, expires_in_s=message.expires_in_seconds)


def _value(kind: Callable[..., Value], message: ProtoMessage, **others: Any) -> Value:
    """A value of a class whose fields have the same names as in the protocol, apart from `others`."""
    names = kind.__annotations__.keys() - others.keys()
    return kind(**{name: getattr(message, name) for name in names}, **others)


def _logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[results.TokenLogprob, ...]:
    return tuple(
        results.TokenLogprob(each.token_id, each.text, each.logprob, _logprobs(each.top), tuple(each.bytes))
        for each in messages
    )
