"""`/v1/completions`: its request as the protocol's, one for each of its prompts."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from corolla.chassis.errors import InvalidRequest
from corolla.client.http.fields import AnswerFields, ListOf, ResponseFormat, TokenId, response_format
from corolla.v1 import generation_pb2 as pb

MAX_PROMPTS: Final = 64


class CompletionRequest(AnswerFields):
    """Prompts to be completed."""

    prompt: str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]] = Field(
        description=f"A text or token ids, or up to {MAX_PROMPTS} of them; with a session_id just one."
    )
    logprobs: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = Field(None, description="0 to 20.")
    response_format: ResponseFormat | None = None
    echo: Literal[False] | None = Field(None, description="Prompts are not repeated.")
    suffix: Literal[""] | None = Field(None, description="Texts are not inserted.")
    best_of: Literal[1] | None = Field(None, description="Answers are not chosen from.")

    def as_protocol(self) -> list[pb.GenerateRequest]:
        """One for each prompt. Raises InvalidRequest."""
        prompts = list(self._prompts())
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest("prompt", f"must be 1 to {MAX_PROMPTS} prompts")
        if len(prompts) > 1 and (self.session_id or self.request_id):
            raise InvalidRequest("prompt", "must be one in a session, or in a request with a name")
        return [
            pb.GenerateRequest(
                **self.shared(self.max_tokens),
                logprobs=self.logprobs,
                response_format=response_format(self.response_format),
                **({"text": each} if isinstance(each, str) else {"tokens": pb.TokenIds(ids=each)}),
            )
            for each in prompts
        ]

    def _prompts(self) -> Iterator[str | list[int]]:
        if isinstance(self.prompt, str):
            yield self.prompt
            return
        ids: list[int] = []
        for each in self.prompt:
            if isinstance(each, int):
                ids.append(each)
            else:
                yield each
        if ids:
            yield ids
