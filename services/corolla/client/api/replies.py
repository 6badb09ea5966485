"""Converts answers, usage and sessions to messages of the public API."""

from collections.abc import Mapping, Sequence
from typing import Final

from corolla.client.generation.admission import RequestCounts
from corolla.client.generation.answer import Delta
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2

_FINISH_REASONS: Final[Mapping[FinishReason, "pb.FinishReason.ValueType"]] = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


def finish_reason(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def usage(counted: RequestCounts) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=counted.prompt_tokens,
        completion_tokens=counted.completion_tokens,
        cached_tokens=0 if counted.withholds_cached_tokens else counted.cached_tokens,
        recoveries=counted.recoveries,
        stall_seconds=counted.stall_s,
        time_to_first_token_seconds=counted.time_to_first_token_s,
        total_seconds=counted.elapsed_s,
        drafted_tokens=counted.drafted_tokens,
        accepted_tokens=counted.accepted_tokens,
    )


def logprobs(tokenizer: TextTokenizer, tokens: Sequence[SampledToken]) -> list[pb.TokenLogprob]:
    """One entry for each token; empty if no log-probabilities were asked for."""

    def entry(token_id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token_id, text=tokenizer.token_text(token_id), logprob=logprob)

    entries = []
    for token in tokens:
        if token.logprob is None:
            continue
        described = entry(token.token_id, token.logprob)
        described.top.extend(entry(token_id, logprob) for token_id, logprob in token.top_logprobs)
        entries.append(described)
    return entries


def session(record: router_pb2.SessionRecord) -> pb.Session:
    return pb.Session(
        session_id=record.session_id,
        model=record.model,
        adapter=record.adapter.name,
        num_tokens=len(record.token_log),
        num_turns=record.num_turns,
        busy=record.busy,
        expires_in_seconds=record.expires_in_ms / 1000,
    )


def completion(tokenizer: TextTokenizer, index: int, answer: Delta) -> pb.Completion:
    """A complete answer to a text; a request may ask for several, which `index` numbers."""
    return pb.Completion(
        index=index,
        text=answer.text,
        token_ids=[token.token_id for token in answer.tokens],
        finish_reason=finish_reason(answer.finish_reason),
        logprobs=logprobs(tokenizer, answer.tokens),
    )


def chat_completion(tokenizer: TextTokenizer, index: int, answer: Delta) -> pb.ChatCompletion:
    """A complete answer to a chat; a request may ask for several, which `index` numbers."""
    return pb.ChatCompletion(
        index=index,
        message=pb.ChatMessage(
            role="assistant",
            content=answer.text,
            reasoning=answer.reasoning,
            tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in answer.calls],
        ),
        token_ids=[token.token_id for token in answer.tokens],
        finish_reason=finish_reason(answer.finish_reason),
        logprobs=logprobs(tokenizer, answer.tokens),
    )


def chat_chunk(tokenizer: TextTokenizer, index: int, delta: Delta, counted: RequestCounts | None) -> pb.ChatChunk:
    """A chunk of one of a chat's answers. `counted`: the usage, for the last chunk of all answers; None: no usage."""
    return pb.ChatChunk(
        index=index,
        token_ids=[token.token_id for token in delta.tokens],
        text_delta=delta.text,
        reasoning_delta=delta.reasoning,
        tool_calls=[
            pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments_delta=call.arguments)
            for call in delta.calls
        ],
        logprobs=logprobs(tokenizer, delta.tokens),
        finish_reason=finish_reason(delta.finish_reason),
        usage=None if counted is None else usage(counted),
    )
