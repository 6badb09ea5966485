"""`/v1/completions`: its request, converted to a gRPC request for each prompt; replies and events of streams."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Final, Literal

from annotated_types import MaxLen
from pydantic import BaseModel, Field

from corolla.chassis.errors import InvalidRequest
from corolla.http import log_probabilities
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
from corolla.http.field_paths import Paths
from corolla.http.fields import AnswerFields, Int32, ListOf, TokenIds, are_several, as_input, inputs_of
from corolla.http.foreign_fields import OF_COMPLETIONS
from corolla.v1 import generation_pb2 as pb

MAX_PROMPTS: Final = 64


class CompletionRequest(AnswerFields):
    """Prompts to be completed."""

    refused_fields = OF_COMPLETIONS

    prompt: (
        str
        | Annotated[ListOf[str], MaxLen(MAX_PROMPTS)]
        | TokenIds
        | Annotated[ListOf[TokenIds], MaxLen(MAX_PROMPTS)]
        | None
    ) = Field(
        None,
        description=f"A text or token ids, or up to {MAX_PROMPTS} of them; with a session_id just one. Without a text, "
        "the answer begins a new one.",
    )
    logprobs: Int32 | None = Field(None, description="Number of alternatives to report for each token, 0 to 20.")
    echo: bool | None = Field(
        None, description="The text begins with the prompt; logprobs adds its log probabilities. max_tokens may be 0."
    )
    suffix: Literal[""] | None = Field(None, description="Texts are not inserted.")
    best_of: Int32 | None = Field(
        None,
        description="The service makes this many answers, 1 to 16, and returns the n most probable; not in streams.",
    )

    def as_protocol(self) -> Iterator[pb.GenerateRequest]:
        """A request in the protocol of gRPC for each prompt, made when it is asked for. Raises InvalidRequest."""
        prompts = inputs_of("" if self.prompt is None else self.prompt)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"must be 1 to {MAX_PROMPTS} prompts")
        if len(prompts) > 1 and (self.session_id or self.request_id):
            raise InvalidRequest("prompt", "must be one in a session, or in a request with a name")
        best_of = self.num_completions if self.best_of is None else self.best_of
        if best_of != self.num_completions and (best_of < self.num_completions or self.stream):
            raise InvalidRequest("best_of", "must not be less than n, and must equal it in a stream")
        # The best answers are those with the most probable tokens.
        logprobs = 0 if self.logprobs is None and best_of > self.num_completions else self.logprobs
        shared = {**self.shared(self.max_tokens), "num_completions": best_of if self.best_of else self.n}
        return (
            pb.GenerateRequest(**shared, logprobs=logprobs, echo=bool(self.echo), **as_input(each)) for each in prompts
        )

    def paths(self, number: int = 0) -> Paths:
        prompt = f"prompt[{number}]" if are_several(self.prompt) else "prompt"
        best = {"num_completions": "best_of"} if self.best_of else {}
        return {**super().paths(), **best, "text": prompt, "tokens.ids": prompt, "tokens": prompt, "prompt": prompt}

    @property
    def num_completions(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n


class CompletionLogprobs(BaseModel):
    """The log probabilities of each token, in the order of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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


async def reply(
    responses: Sequence[pb.GenerateResponse], num_completions: int, *, has_logprobs: bool, has_token_ids: bool
) -> AsyncGenerator[str, None]:
    """The pieces of a `Completion`, which is not streamed, with the best `num_completions` answers to each prompt.

    The log probabilities of an echoed prompt are made once for all answers to it.
    """
    facts = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s(), "model": responses[0].model}
    yield compact(facts)[:-1] + ',"choices":['
    for number, response in enumerate(responses):
        prompt = await _prompt_logprobs(response.prompt) if has_logprobs else None
        for index, each in enumerate(_best(response.completions, num_completions)):
            place = number * num_completions + index
            text = escaped(response.prompt.text + each.text)
            yield f'{"," if place else ""}{{"index":{place},"text":{text},"logprobs":'
            if prompt is not None:
                logprobs = prompt.copy()
                await logprobs.add(each.logprobs)
                for piece in logprobs.pieces():
                    yield piece
            else:
                yield "null"
            token_ids = ids_text(each.token_ids) if has_token_ids else "null"
            yield f',"finish_reason":{compact(FINISH_REASONS[each.finish_reason])},"token_ids":{token_ids}}}'
    yield f'],"usage":{usage_of(*(each.usage for each in responses)).model_dump_json()}}}'


def _best(completions: Sequence[pb.Completion], number: int) -> Sequence[pb.Completion]:
    """The completions whose tokens are the most probable on average; all of them if no more are there."""
    if len(completions) <= number:
        return completions

    def mean(completion: pb.Completion) -> float:
        return sum(each.logprob for each in completion.logprobs) / max(1, len(completion.logprobs))

    return sorted(completions, key=mean, reverse=True)[:number]


async def _prompt_logprobs(prompt: pb.EchoedPrompt) -> log_probabilities.CompletionLogprobs:
    text = log_probabilities.CompletionLogprobs()
    await text.add(prompt.logprobs, prompt.first if prompt.token_ids else None)
    return text


class _LogprobsOfStreams:
    """The log probabilities of the chunks of several answers. Those of an echoed prompt are made once."""

    def __init__(self) -> None:
        self._answers: dict[int, log_probabilities.CompletionLogprobs] = {}
        self._prompts: dict[int, log_probabilities.CompletionLogprobs] = {}

    async def of(self, number: int, index: int, chunk: pb.GenerateChunk) -> Sequence[str]:
        """The pieces of the JSON for a chunk of answer `index`, which is one to prompt `number`."""
        if chunk.HasField("prompt"):
            self._prompts[number] = await _prompt_logprobs(chunk.prompt)
        if index not in self._answers and number in self._prompts:
            begun = self._answers[index] = self._prompts[number].copy()
            await begun.add(chunk.logprobs)
            return list(begun.pieces())
        answer = self._answers.setdefault(index, log_probabilities.CompletionLogprobs())
        return [compact(answer.facts(chunk.logprobs)) if chunk.logprobs else "null"]


async def events(
    chunks: AsyncGenerator[tuple[int, pb.GenerateChunk], None],
    model: str,
    num_completions: int,
    *,
    has_usage: bool,
    has_continuous_usage: bool = False,
    has_logprobs: bool,
    has_token_ids: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: texts, an end for each completion, the usage if it is wanted, and `[DONE]`.

    Args:
        chunks: the chunks, each with the number of its prompt.
        num_completions: the number of completions of each prompt.
    """
    facts = {"id": new_id("cmpl-"), "object": "text_completion", "created": now_s(), "model": model}
    no_usage = ',"usage":null' if has_usage and not has_continuous_usage else ""
    head = "data: " + compact(facts)[:-1] + no_usage + ',"choices":[{"index":'
    texts = _LogprobsOfStreams() if has_logprobs else None
    counted: dict[int, pb.Usage] = {}
    prompts: dict[int, str] = {}
    begun: set[int] = set()
    async with aclosing(chunks):
        async for number, chunk in chunks:
            index = number * num_completions + chunk.index
            reason = FINISH_REASONS[chunk.finish_reason]
            if chunk.HasField("usage"):
                counted[number] = chunk.usage
            if chunk.HasField("prompt"):
                prompts[number] = chunk.prompt.text
            text = chunk.text_delta if index in begun else prompts.get(number, "") + chunk.text_delta
            begun.add(index)
            logprobs = await texts.of(number, index, chunk) if texts is not None else ["null"]
            token_ids = f',"token_ids":{ids_text(chunk.token_ids)}' if has_token_ids else ""
            if not (text or reason or token_ids or logprobs != ["null"]):
                continue
            usage = f',"usage":{compact(usage_of(chunk.usage).model_dump())}' if has_continuous_usage else ""
            tail = f'{token_ids},"finish_reason":{compact(reason)}}}]{usage}}}\n\n'
            yield "".join((f'{head}{index},"text":{escaped(text)},"logprobs":', *logprobs, tail)).encode()
    if has_usage:
        usage_facts = {**facts, "choices": [], "usage": usage_of(*counted.values()).model_dump()}
        yield f"data: {compact(usage_facts)}\n\n".encode()
    yield DONE
