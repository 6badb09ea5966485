"""Converts answers, usage and sessions to messages of the public API."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from corolla.chain.prompt_readout import PromptReadout
from corolla.client.output_parsing.deltas import Delta
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
from corolla.decoding.stopping import FinishReason
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2

PIECE_TOKENS: Final = 64
"""How many tokens' log probabilities are written at a time. 64 tokens with 20 alternatives each take milliseconds."""

Entries = Any
"""A field of a message that holds log probabilities."""

_FINISH_REASONS: Final[Mapping[FinishReason, "pb.FinishReason.ValueType"]] = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


def finish_reason(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def logprobs(tokenizer: TextTokenizer, tokens: Sequence[SampledToken]) -> list[pb.TokenLogprob]:
    """One entry for each token; empty if no log-probabilities were asked for."""

    def entry(token_id: int, logprob: float) -> pb.TokenLogprob:
        own = tokenizer.token_bytes(token_id)
        return pb.TokenLogprob(token_id=token_id, text=own.decode(errors="replace"), logprob=logprob, bytes=own)

    entries = []
    for token in tokens:
        if token.logprob is None:
            continue
        described = entry(token.token_id, token.logprob)
        described.top.extend(entry(token_id, logprob) for token_id, logprob in token.top_logprobs)
        entries.append(described)
    return entries


async def add_logprobs(entries: Entries, tokenizer: TextTokenizer, tokens: Sequence[SampledToken]) -> None:
    """Adds one entry for each token, as `logprobs`. Other tasks run between two pieces."""
    for start in range(0, len(tokens), PIECE_TOKENS):
        entries.extend(logprobs(tokenizer, tokens[start : start + PIECE_TOKENS]))
        await asyncio.sleep(0)


async def echoed_prompt(
    tokenizer: TextTokenizer, prompt: str | Sequence[int], readout: PromptReadout
) -> pb.EchoedPrompt:
    """A prompt as a caller gave it, with its tokens and their log probabilities."""
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
    own = tokenizer.token_bytes(readout.prompt_ids[0])
    first = pb.TokenLogprob(token_id=readout.prompt_ids[0], text=own.decode(errors="replace"), bytes=own)
    echoed = pb.EchoedPrompt(text=text, token_ids=readout.prompt_ids, first=first)
    await add_logprobs(echoed.logprobs, tokenizer, readout.scored)
    return echoed


async def score(
    tokenizer: TextTokenizer, model: str, readout: PromptReadout, num_logprobs: int, usage: pb.Usage
) -> pb.ScoreResponse:
    """The score of a continuation; `num_logprobs` is how many probable tokens the caller wants to see."""
    scored = [replace(token, top_logprobs=token.top_logprobs[:num_logprobs]) for token in readout.scored]
    response = pb.ScoreResponse(
        model=model,
        logprob=math.fsum(token.logprob or 0.0 for token in scored),
        is_greedy=all(token.token_id == token.top_logprobs[0][0] for token in readout.scored),
        usage=usage,
    )
    await add_logprobs(response.logprobs, tokenizer, scored)
    return response


def embedding(readout: PromptReadout, message: pb.EmbedRequest) -> list[float]:
    """The vector that an EmbedRequest asks for, from the pooled hidden states."""
    num_pooled = 1 if message.pooling == pb.EmbedRequest.POOLING_LAST else len(readout.prompt_ids)
    vector = [value / num_pooled for value in readout.pooled]
    if message.HasField("dimensions"):
        vector = vector[: message.dimensions]
    if message.without_normalisation:
        return vector
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector


def session(record: router_pb2.SessionRecord, model: str) -> pb.Session:
    """A session as its owner sees it; callers know the model as `model`."""
    return pb.Session(
        session_id=record.session_id,
        model=model,
        adapter=record.adapter.name,
        num_tokens=len(record.token_log),
        num_turns=record.num_turns,
        busy=record.busy,
        expires_in_seconds=record.expires_in_ms / 1000,
    )


async def write_completion(written: pb.Completion, tokenizer: TextTokenizer, answer: Delta) -> None:
    """Writes a complete answer to a text."""
    written.text = answer.text
    await _write_tokens(written, tokenizer, answer)


async def write_chat(written: pb.ChatResponse | pb.ChatCompletion, tokenizer: TextTokenizer, answer: Delta) -> None:
    """Writes a complete answer to a chat."""
    written.stop_sequence = answer.stop_sequence
    written.message.CopyFrom(answer.message)
    await _write_tokens(written, tokenizer, answer)


async def _write_tokens(
    written: pb.Completion | pb.ChatResponse | pb.ChatCompletion, tokenizer: TextTokenizer, answer: Delta
) -> None:
    written.token_ids.extend(token.token_id for token in answer.tokens)
    written.finish_reason = finish_reason(answer.finish_reason)
    await add_logprobs(written.logprobs, tokenizer, answer.tokens)


def chat_chunk(tokenizer: TextTokenizer, index: int, delta: Delta, usage: pb.Usage | None) -> pb.ChatChunk:
    """A chunk of one of a chat's answers. `usage`: for the last chunk of all answers."""
    return pb.ChatChunk(
        index=index,
        token_ids=[token.token_id for token in delta.tokens],
        text_delta=delta.text,
        reasoning_delta=delta.reasoning,
        tool_calls=delta.calls,
        logprobs=logprobs(tokenizer, delta.tokens),
        finish_reason=finish_reason(delta.finish_reason),
        usage=usage,
        stop_sequence=delta.stop_sequence,
    )
