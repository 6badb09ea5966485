"""The calls of a client service, for asyncio."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage
from grpc import aio

from corolla.sdk import requests, responses
from corolla.sdk.messages import AnyMessage
from corolla.sdk.requests import ChatOptions, GenerateOptions, Prompt
from corolla.sdk.results import Generation, Model, Reply, SessionInfo, Tokens
from corolla.sdk.streams import AsyncStream
from corolla.sdk.tools import AnyTool
from corolla.sdk.transport import CHANNEL_OPTIONS, AsyncApiKey, async_begun, async_call_metadata, error_of
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub

Answered = TypeVar("Answered", bound=ProtoMessage)


class AsyncCalls:
    """Makes the calls of a client service. The arguments are those of `AsyncClient`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: AsyncApiKey = None,
        timeout: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self._api_key = api_key
        self._timeout_s = timeout
        self._channel = (
            aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if credentials is None
            else aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub = GenerationServiceStub(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Completes a prompt: text, or token ids. The options are those of `GenerateOptions`."""
        request = requests.generate_request(prompt, options)
        return responses.generation(await self._call(self._stub.Generate, request, timeout_s=options.get("timeout")))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Completes a prompt chunk by chunk."""
        request = requests.generate_request(prompt, options)
        return self._stream(self._stub.GenerateStream, request, timeout_s=options.get("timeout"))

    async def complete_chat(
        self, messages: Sequence[AnyMessage], *, session: str = "", **options: Unpack[ChatOptions]
    ) -> Reply:
        """Answers a whole conversation, or what is new of a session's. It may call tools; see `ChatOptions`."""
        request = requests.chat_request(messages, options, session)
        return responses.reply(await self._call(self._stub.Chat, request, timeout_s=options.get("timeout")))

    def stream_chat(
        self, messages: Sequence[AnyMessage], *, session: str = "", **options: Unpack[ChatOptions]
    ) -> AsyncStream:
        """`complete_chat`, chunk by chunk."""
        request = requests.chat_request(messages, options, session)
        return self._stream(self._stub.ChatStream, request, timeout_s=options.get("timeout"))

    async def create_session(self, model: str = "", adapter: str = "") -> SessionInfo:
        request = pb.CreateSessionRequest(model=model, adapter=adapter)
        return responses.session(await self._call(self._stub.CreateSession, request))

    async def get_session(self, session_id: str) -> SessionInfo:
        request = pb.GetSessionRequest(session_id=session_id)
        return responses.session(await self._call(self._stub.GetSession, request))

    async def delete_session(self, session_id: str) -> None:
        await self._call(self._stub.DeleteSession, pb.DeleteSessionRequest(session_id=session_id))

    async def tokenize(
        self,
        text: str | Sequence[AnyMessage],
        *,
        model: str = "",
        special_tokens: bool = True,
        tools: Sequence[AnyTool] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """A text's tokens, or a conversation's after the model's chat template.

        Args:
            special_tokens: whether the tokens that the tokenizer adds of itself are among them.
            tools, template_arguments: of a conversation; see `ChatOptions`.
        """
        request = requests.tokenize_request(
            text, model, special_tokens=special_tokens, tools=tools, template_arguments=template_arguments
        )
        return responses.tokens(await self._call(self._stub.Tokenize, request))

    async def models(self) -> tuple[Model, ...]:
        """The models that the service has."""
        listed = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return tuple(responses.model(each) for each in listed.models)

    async def model(self, name: str) -> Model:
        """One model by its name; see `models`."""
        return responses.model(await self._call(self._stub.GetModel, pb.GetModelRequest(model=name)))

    async def close(self) -> None:
        """Closes the connection; what still runs is cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_failure: object) -> None:
        await self.close()

    async def _call(
        self,
        method: "aio.UnaryUnaryMultiCallable[Any, Answered]",
        request: ProtoMessage,
        *,
        timeout_s: float | None = None,
    ) -> Answered:
        try:
            metadata = await async_call_metadata(self._api_key)
            return await method(request, timeout=self._limit(timeout_s), metadata=metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from None

    def _stream(
        self, method: "aio.UnaryStreamMultiCallable[Any, Any]", request: ProtoMessage, *, timeout_s: float | None = None
    ) -> AsyncStream:
        call = partial(method, request, timeout=self._limit(timeout_s))
        return AsyncStream(async_begun(call, self._api_key), self.address)

    def _limit(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s
