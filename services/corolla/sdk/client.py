"""The Python client for ordinary, blocking code."""

# Written by tools/sync_client.py from async_client.py; change that, then run `make sync-client`.

import inspect
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message as ProtoMessage

from corolla.chassis.errors import CorollaError, SessionBusy
from corolla.chassis.ignored_places import ignored_places
from corolla.sdk import requests, responses
from corolla.sdk.answer import Answer
from corolla.sdk.messages import AnyMessage, Turn
from corolla.sdk.requests import ChatOptions, GenerateOptions, Prompt, ReadOptions
from corolla.sdk.results import Chunk, Embedding, Generation, Message, Model, Reply, Score, SessionInfo, Tokens, Usage
from corolla.sdk.tools import AnyTool
from corolla.sdk.transport import (
    CHANNEL_OPTIONS,
    ApiKey,
    begun,
    call_metadata,
    called,
    error_of,
    read,
)
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub

Answered = TypeVar("Answered", bound=ProtoMessage)

_SETTLE_S: Final = 10.0
"""How long a chat waits for the service to end a turn that was left early, in seconds."""
_SETTLE_INTERVAL_S: Final = 0.05


class Stream(Answer):
    """Iterates over `Chunk`s. `text`, `token_ids`, `completions`, `finish_reason` and `usage` hold the answer so far.

    Leaving its context, or `close()`, cancels an unfinished answer and frees its KV cache, and so does an exception
    while it waits for a chunk. Iterating raises the errors of `corolla.chassis.errors`.

    Args:
        call: the call, or a coroutine that starts and returns it; the first read of a chunk awaits the coroutine.
    """

    def __init__(self, call: Any, address: str) -> None:
        super().__init__()
        self._call = call
        self._address = address
        self._closed = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._closed:
            raise StopIteration
        try:
            if inspect.iscoroutine(self._call):
                self._call = self._call
            message = read(self._call)
        except grpc.RpcError as failure:
            if self._closed:
                raise StopIteration from None
            self._closed = True
            raise error_of(failure, self._address) from None
        except BaseException:
            self._closed = True
            raise
        if message is None:
            self._closed = True
            self.ignored = ignored_places(self._call.trailing_metadata())
            raise StopIteration
        return self._add(message)

    def close(self) -> None:
        """Cancels the call if it still runs. May be called from any thread."""
        self._closed = True
        if inspect.iscoroutine(self._call):
            self._call.close()
        else:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()


class Client:
    """Calls a Corolla client service. Safe to share between threads.

        with Client("127.0.0.1:50051") as client:
            for chunk in client.stream("The capital of France is", max_tokens=8):
                print(chunk.text, end="")

    Failed calls raise a class of `corolla.chassis.errors`, with `reason` and `message`. Where waiting helps, it has
    `retry_after_s`, too.

    Args:
        address: host:port of the client service, or any gRPC target.
        api_key: key or token, if the service requires one; or a function that returns the current one. The client calls
            this function before each call, so it can renew a token that expires, and should cache it.
        timeout: seconds that a call may take, unless the call has its own timeout; None is without limit.
        credentials: the credentials for TLS, such as `grpc.ssl_channel_credentials()`; None is plain text.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: ApiKey = None,
        timeout: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self._api_key = api_key
        self._timeout_s = timeout
        self._channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub = GenerationServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Completes a prompt: text, or token ids. See `GenerateOptions` for the options."""
        request = requests.generate_request(prompt, options)
        answered = self._called(self._stub.Generate, request, options)
        return responses.generation(*answered)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Completes a prompt chunk by chunk."""
        request = requests.generate_request(prompt, options)
        return self._stream(self._stub.GenerateStream, request, options)

    def complete_chat(
        self, messages: Sequence[AnyMessage], *, session: str = "", **options: Unpack[ChatOptions]
    ) -> Reply:
        """Answers a whole conversation, or a session's new messages. The answer may call tools; see `ChatOptions`."""
        request = requests.chat_request(messages, options, session)
        return responses.reply(*self._called(self._stub.Chat, request, options))

    def stream_chat(
        self, messages: Sequence[AnyMessage], *, session: str = "", **options: Unpack[ChatOptions]
    ) -> Stream:
        """Does the same as `complete_chat`, chunk by chunk."""
        request = requests.chat_request(messages, options, session)
        return self._stream(self._stub.ChatStream, request, options)

    def create_session(self, model: str = "", adapter: str = "") -> SessionInfo:
        request = pb.CreateSessionRequest(model=model, adapter=adapter)
        return responses.session(self._answer(self._stub.CreateSession, request))

    def get_session(self, session_id: str) -> SessionInfo:
        request = pb.GetSessionRequest(session_id=session_id)
        return responses.session(self._answer(self._stub.GetSession, request))

    def delete_session(self, session_id: str) -> None:
        self._answer(self._stub.DeleteSession, pb.DeleteSessionRequest(session_id=session_id))

    def tokenize(
        self,
        text: str | Sequence[AnyMessage],
        *,
        model: str = "",
        special_tokens: bool = True,
        tools: Sequence[AnyTool] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """Returns the tokens of a text, or of a conversation that the model's chat template has made into text.

        Args:
            special_tokens: whether to include the tokens that the tokenizer itself adds to a text.
            tools, template_arguments: the same as in `ChatOptions`.
        """
        request = requests.tokenize_request(
            text, model, special_tokens=special_tokens, tools=tools, template_arguments=template_arguments
        )
        return responses.tokens(self._answer(self._stub.Tokenize, request))

    def score(
        self, prompt: Prompt, continuation: Prompt, *, logprobs: int | None = None, **options: Unpack[ReadOptions]
    ) -> Score:
        """Tells how probable a continuation is after a prompt, which may be empty; both are text, or both token ids.

        Args:
            logprobs: how many of the most likely tokens to report for each token of the continuation, 0 to 20.
        """
        request = requests.score_request(prompt, continuation, options, logprobs)
        return responses.score(self._answer(self._stub.Score, request, **options))

    def embed(
        self,
        text: Prompt,
        *,
        pooling: str = "mean",
        dimensions: int | None = None,
        normalise: bool = True,
        **options: Unpack[ReadOptions],
    ) -> Embedding:
        """Makes a vector of a text, or of token ids, from the model's last hidden states.

        Args:
            pooling: "mean" over all tokens, or the "last" token.
            dimensions: how many of the first numbers are kept; None: all.
            normalise: whether the vector has the length 1.
        """
        request = requests.embed_request(text, options, pooling, dimensions, is_normalised=normalise)
        return responses.embedding(self._answer(self._stub.Embed, request, **options))

    def models(self) -> tuple[Model, ...]:
        """Returns the models that the service has."""
        listed = self._answer(self._stub.ListModels, pb.ListModelsRequest())
        return tuple(responses.model(each) for each in listed.models)

    def model(self, name: str) -> Model:
        """Returns one model by its name; see `models`."""
        return responses.model(self._answer(self._stub.GetModel, pb.GetModelRequest(model=name)))

    def chat(self, *, system: str | None = None, session: str | None = None, **options: Unpack[ChatOptions]) -> "Chat":
        """Returns a conversation whose messages the service keeps.

        Args:
            system: system message that goes before the first turn.
            session: id of an existing session that the chat continues; it is not deleted at the end.
            options: options for every turn; a turn's own options take precedence.
        """
        return Chat(self, system=system, session_id=session, options=options)

    def session(self, session_id: str | None = None, *, model: str = "", adapter: str = "") -> "Session":
        """Returns a session: a new one, which is deleted at the end, or an existing one by its id.

        Args:
            adapter: name of the adapter with which a new session computes all turns.
        """
        return Session(self, session_id=session_id, model=model, adapter=adapter)

    def close(self) -> None:
        """Closes the connection and cancels the calls that still run."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def _called(
        self, method: "grpc.UnaryUnaryMultiCallable[Any, Answered]", request: ProtoMessage, options: Mapping[str, Any]
    ) -> tuple[Answered, tuple[str, ...]]:
        """Returns the answer, and the places in the request that had no effect."""
        try:
            metadata = call_metadata(self._api_key)
            return called(method, request, timeout=self._limit(options), metadata=metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self.address) from None

    def _answer(
        self, method: "grpc.UnaryUnaryMultiCallable[Any, Answered]", request: ProtoMessage, **options: Any
    ) -> Answered:
        return (self._called(method, request, options))[0]

    def _stream(
        self, method: "grpc.UnaryStreamMultiCallable[Any, Any]", request: ProtoMessage, options: Mapping[str, Any]
    ) -> Stream:
        call = partial(method, request, timeout=self._limit(options))
        return Stream(begun(call, self._api_key), self.address)

    def _limit(self, options: Mapping[str, Any]) -> float | None:
        timeout_s: float | None = options.get("timeout")
        return self._timeout_s if timeout_s is None else timeout_s


class Session:
    """A text that the service keeps, and to which each prompt and its answer are appended. The first use creates it."""

    def __init__(self, client: Client, *, session_id: str | None, model: str, adapter: str = "") -> None:
        self._client = client
        self._model = model
        self._adapter = adapter
        self._id = session_id
        self._is_own = session_id is None
        # When several callers use the session for the first time at once, one of them creates it.
        self._opening = threading.Lock()

    @property
    def session_id(self) -> str:
        """The session's id, 128 random bits in hexadecimal. The first use creates the session."""
        with self._opening:
            if self._id is None:
                self._id = (self._client.create_session(self._model, self._adapter)).session_id
            return self._id

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        return self._client.generate(prompt, **self._turn(options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        return self._client.stream(prompt, **self._turn(options))

    def _turn(self, options: GenerateOptions) -> GenerateOptions:
        """Adds the session's model and adapter to a turn's options, because a key may be limited to them."""
        return {"model": self._model, "adapter": self._adapter, **options, "session": self.session_id}

    def info(self) -> SessionInfo:
        return self._client.get_session(self.session_id)

    def delete(self) -> None:
        """Deletes the session; the next use creates a new one."""
        if self._id is not None:
            self._client.delete_session(self._id)
            self._id, self._is_own = None, True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        if not self._is_own:
            return
        try:
            self.delete()
        except CorollaError:
            # The session expires by itself. If another error is being raised, that error is more useful.
            if failure is None:
                raise


class Chat:
    """A conversation. Each turn sends only new messages; the service keeps the earlier ones.

    with client.chat(system="Answer in one sentence.") as chat:
        print(chat.send("What is a corolla?"))
        for chunk in chat.stream("And a petal?"):
            print(chunk.text, end="")
        print(chat.usage.cached_tokens)
    """

    def __init__(self, client: Client, *, system: str | None, session_id: str | None, options: ChatOptions) -> None:
        self._client = client
        self._options = options
        self._session = Session(
            client, session_id=session_id, model=options.get("model", ""), adapter=options.get("adapter", "")
        )
        self._system = system
        self._num_turns = 0 if session_id is None else 1
        self._turn: Answer | None = None
        self._running: Stream | None = None
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        """The usage of the last completed turn; None before it."""
        return (self._turn.usage if self._turn else None) or self._usage

    @property
    def session_id(self) -> str:
        """The session's id. The first use creates the session."""
        return self._session.session_id

    def send(self, turn: Turn, **options: Unpack[ChatOptions]) -> Reply:
        """Sends one turn (a user's text, or messages) and returns the whole answer."""
        messages = self._messages(turn)
        merged: ChatOptions = {**self._options, **options}
        session_id = self._session.session_id
        # Even if no answer arrives, the service may have stored the turn.
        self._turn = Answer()
        reply = self._client.complete_chat(messages, session=session_id, **merged)
        self._end(reply.usage)
        return reply

    def stream(self, turn: Turn, **options: Unpack[ChatOptions]) -> Stream:
        """Sends one turn and streams the answer. Closing the stream early ends the turn there."""
        messages = self._messages(turn)
        merged: ChatOptions = {**self._options, **options}
        self._running = self._client.stream_chat(messages, session=self._session.session_id, **merged)
        self._turn = self._running
        return self._running

    def info(self) -> SessionInfo:
        return self._session.info()

    def close(self) -> None:
        """Ends a running turn, and deletes the session unless it existed before."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        if self._running is not None:
            self._running.close()
        self._session.__exit__(kind, failure, trace)

    def _messages(self, turn: Turn) -> list[AnyMessage]:
        """What the next turn sends: the system message goes with the first turn that the session keeps."""
        if self._turn is None or self._turn.usage is not None:
            self._end(self._turn.usage if self._turn else None)
        else:
            self._settle()
        system = [Message("system", self._system)] if self._system and not self._num_turns else []
        return [*system, *([Message("user", turn)] if isinstance(turn, str) else turn)]

    def _end(self, usage: Usage | None) -> None:
        """Counts the last turn if it was completed."""
        if usage is not None:
            self._usage = usage
            self._num_turns += 1
        self._turn = None

    def _settle(self) -> None:
        """Waits until the service has ended a turn that was left early, and asks how many turns the session has.

        After such a turn, only the service knows what the session holds.
        """
        if self._running is not None:
            self._running.close()
        give_up = time.monotonic() + _SETTLE_S
        while (info := self._session.info()).busy:
            if time.monotonic() > give_up:
                raise SessionBusy("the turn before was cancelled but has not ended yet")
            time.sleep(_SETTLE_INTERVAL_S)
        self._num_turns, self._turn = info.num_turns, None
