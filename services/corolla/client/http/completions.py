"""`/v1/completions`: its request, converted to a gRPC request for each prompt; replies and events of streams."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal

from pydantic import BaseModel, Field

from corolla.chassis.errors import InvalidRequest
from corolla.client.http.answers import (
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
from corolla.client.http.fields import AnswerFields, Int32, ListOf, TokenId
from corolla.client.http.foreign_fields import OF_COMPLETIONS
from corolla.v1 import generation_pb2 as pb

MAX_PROMPTS: Final = 64


class CompletionRequest(AnswerFields):
    """Prompts to be completed."""

    refused_fields = OF_COMPLETIONS

    prompt: str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]] | None = Field(
        None,
        description=f"A text or token ids, or up to {MAX_PROMPTS} of them; with a session_id just one. Without a text, "
        "the answer begins a new one.",
    )
    logprobs: Int32 | None = Field(None, description="0 to 20.")
    echo: Literal[False] | None = Field(None, description="Prompts are not repeated.")
    suffix: Literal[""] | None = Field(None, description="Texts are not inserted.")
    best_of: Literal[1] | None = Field(None, description="Answers are not chosen from.")

    def as_protocol(self) -> list[pb.GenerateRequest]:
        """A request in the protocol of gRPC for each prompt. Raises InvalidRequest."""
        prompts = list(self._prompts())
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"must be 1 to {MAX_PROMPTS} prompts")
        if len(prompts) > 1 and (self.session_id or self.request_id):
            raise InvalidRequest("prompt", "must be one in a session, or in a request with a name")
        return [
            pb.GenerateRequest(
                **self.shared(self.max_tokens),
                logprobs=self.logprobs,
                **({"text": each} if isinstance(each, str) else {"tokens": pb.TokenIds(ids=each)}),
            )
            for each in prompts
        ]

    def _prompts(self) -> Iterator[str | list[int]]:
        if self.prompt is None or isinstance(self.prompt, str):
            yield self.prompt or ""
            return
        ids: list[int] = []
        for each in self.prompt:
            if isinstance(each, int):
                ids.append(each)
            else:
                yield each
        if ids:
            yield ids


class CompletionLogprobs(BaseModel):
    """The log probabilities of each token, in the order of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class Completion(BaseModel):
    """The completions of all prompts, ordered by prompt."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


def reply(responses: Sequence[pb.GenerateResponse], *, has_logprobs: bool, has_token_ids: bool) -> bytes:
    """The body of a reply that is not streamed."""
    choices = [
        CompletionChoice(
            index=number * len(response.completions) + each.index,
            text=each.text,
            logprobs=CompletionLogprobs.model_validate(_logprob_facts(each.logprobs, 0)) if has_logprobs else None,
            finish_reason=FINISH_REASONS[each.finish_reason],  # type: ignore[arg-type]
            token_ids=list(each.token_ids) if has_token_ids else None,
        )
        for number, response in enumerate(responses)
        for each in response.completions
    ]
    completion = Completion(
        id=new_id("cmpl-"),
        created=now_s(),
        model=responses[0].model,
        choices=choices,
        usage=usage_of(*(each.usage for each in responses)),
    )
    return completion.model_dump_json().encode()


async def events(
    chunks: AsyncGenerator[tuple[int, pb.GenerateChunk], None],
    model: str,
    num_completions: int,
    *,
    has_usage: bool,
    has_logprobs: bool,
    has_token_ids: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: texts, an end for each completion, the usage if it is wanted, and `[DONE]`.

    Args:
        chunks: the chunks, each with the number of its prompt.
        num_completions: the number of completions of each prompt.
    """
    facts = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s(), "model": model}
    head = "data: " + compact(facts)[:-1] + (',"usage":null' if has_usage else "") + ',"choices":[{"index":'
    offsets: dict[int, int] = {}
    counted: list[pb.Usage] = []
    async with aclosing(chunks):
        async for number, chunk in chunks:
            index = number * num_completions + chunk.index
            reason = FINISH_REASONS[chunk.finish_reason]
            if chunk.HasField("usage"):
                counted.append(chunk.usage)
            logprobs = "null"
            if has_logprobs and chunk.logprobs:
                found = _logprob_facts(chunk.logprobs, offsets.get(index, 0))
                offsets[index] = offsets.get(index, 0) + sum(map(len, found["tokens"]))
                logprobs = compact(found)
            token_ids = f',"token_ids":{ids_text(chunk.token_ids)}' if has_token_ids else ""
            if not (chunk.text_delta or reason or token_ids or logprobs != "null"):
                continue
            end = f'"{reason}"' if reason else "null"
            yield (
                f'{head}{index},"text":{escaped(chunk.text_delta)},"logprobs":{logprobs}{token_ids},'
                f'"finish_reason":{end}}}]}}\n\n'
            ).encode()
    if has_usage:
        yield f"data: {compact({**facts, 'choices': [], 'usage': usage_of(*counted).model_dump()})}\n\n".encode()
    yield DONE


def _logprob_facts(entries: Sequence[pb.TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{each.text: each.logprob for each in entry.top} for entry in entries],
        "text_offset": offsets,
    }
