"""The routes of HTTP over the servicer of gRPC: a request is read, asked of the servicer, and its answer written."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from pydantic import BaseModel, Field

from corolla.chassis.calls import Call
from corolla.chassis.merge import merge
from corolla.client.api.servicer import GenerationServicer
from corolla.client.api.tenants import KeyHolder
from corolla.client.http import chat_replies, completion_replies
from corolla.client.http.answers import now_s
from corolla.client.http.chat import ChatCompletionRequest
from corolla.client.http.completions import CompletionRequest
from corolla.client.http.exchange import Exchange
from corolla.v1 import generation_pb2 as pb

PART_OF_MODEL: Final = "model"


class ModelFacts(BaseModel):
    """A model that the service has."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "corolla"
    max_model_len: int = Field(description="Tokens of its context.")
    ready: bool = Field(description="Whether every block has a live server now.")


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelFacts]


class Surface:
    """What each route does.

    Args:
        model: the name of the model that is served.
    """

    def __init__(self, servicer: GenerationServicer, model: str) -> None:
        self._servicer = servicer
        self._model = model
        self._created = now_s()

    async def list_models(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """The models that the service has."""
        await exchange.without_body()
        found = await self._servicer.ListModels(pb.ListModelsRequest(), call)
        await _reply(exchange, ModelList(data=[self._facts(each) for each in found.models]))

    async def get_model(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """One of them."""
        await exchange.without_body()
        request = pb.GetModelRequest(model=exchange.path_parameters[PART_OF_MODEL])
        await _reply(exchange, self._facts(await self._servicer.GetModel(request, call)))

    async def chat(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Answers a conversation."""
        body = await exchange.read(ChatCompletionRequest)
        request = body.as_protocol()
        wishes = {"has_logprobs": bool(body.logprobs), "has_token_ids": body.has_token_ids}
        if body.streams:
            chunks = self._servicer.ChatStream(request, call)
            await exchange.stream(chat_replies.events(chunks, self._model, has_usage=body.has_usage, **wishes))
            return
        await exchange.reply(chat_replies.reply(await self._servicer.Chat(request, call), **wishes))

    async def complete(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Completes prompts."""
        body = await exchange.read(CompletionRequest)
        requests = body.as_protocol()
        wishes = {"has_logprobs": body.logprobs is not None, "has_token_ids": body.has_token_ids}
        if body.streams:
            chunks = merge([self._servicer.GenerateStream(each, call) for each in requests])
            num_completions = 1 if body.n is None else body.n
            await exchange.stream(
                completion_replies.events(chunks, self._model, num_completions, has_usage=body.has_usage, **wishes)
            )
            return
        responses = [each async for each in _in_order([self._generated(each, call) for each in requests])]
        await exchange.reply(completion_replies.reply(responses, **wishes))

    async def _generated(
        self, request: pb.GenerateRequest, call: Call[KeyHolder]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        yield await self._servicer.Generate(request, call)

    def _facts(self, model: pb.Model) -> ModelFacts:
        return ModelFacts(id=model.name, created=self._created, max_model_len=model.context_length, ready=model.ready)


async def _in_order(answers: Sequence[AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """What all give, at the same time, in the order in which they stand. The first failure ends them all."""
    found = {number: answer async for number, answer in merge(answers)}
    for number in sorted(found):
        yield found[number]


async def _reply(exchange: Exchange, value: BaseModel) -> None:
    await exchange.reply(value.model_dump_json().encode())
