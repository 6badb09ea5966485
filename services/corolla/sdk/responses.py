"""Turns the service's messages into values of `corolla.sdk.results`."""

from collections.abc import Iterable
from dataclasses import fields

from corolla.sdk import results
from corolla.v1 import generation_pb2 as pb

_FINISH_REASONS: dict[int, results.FinishReason] = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in results.FinishReason
}


def usage(message: pb.Usage) -> results.Usage:
    return results.Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        recoveries=message.recoveries,
        stall_s=message.stall_seconds,
        time_to_first_token_s=message.time_to_first_token_seconds,
        total_s=message.total_seconds,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        may_differ_from_token=(message.may_differ_from_token if message.HasField("may_differ_from_token") else None),
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
    # The fields of `Model` have the same names as in the protocol.
    return results.Model(**{each.name: getattr(message, each.name) for each in fields(results.Model)})


def session(message: pb.Session) -> results.SessionInfo:
    return results.SessionInfo(
        session_id=message.session_id,
        model=message.model,
        num_tokens=message.num_tokens,
        num_turns=message.num_turns,
        busy=message.busy,
        expires_in_s=message.expires_in_seconds,
        adapter=message.adapter,
    )


def _logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[results.TokenLogprob, ...]:
    return tuple(
        results.TokenLogprob(each.token_id, each.text, each.logprob, _logprobs(each.top), tuple(each.bytes))
        for each in messages
    )
