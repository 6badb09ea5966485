"""The routes of HTTP: each one reads a request, calls the servicer of gRPC, and writes its answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, Field

from corolla.chassis.calls import Call
from corolla.chassis.errors import CorollaError, ServiceUnavailable
from corolla.chassis.merge import merge
from corolla.client.api.replies import finish_reason
from corolla.client.api.servicer import GenerationServicer
from corolla.client.api.tenants import KeyHolder
from corolla.client.reply_sizes import ANY_ROOM, CHATS, COMPLETIONS, RESPONSES, STREAMED_RESPONSES, ReplyRoom
from corolla.decoding.stopping import FinishReason
from corolla.http import chat_replies, completions, message_replies, readings, tokenization
from corolla.http.answers import now_s
from corolla.http.chat import ChatCompletionRequest
from corolla.http.completions import CompletionRequest
from corolla.http.exchange import Exchange
from corolla.http.fields import Body, ModelName
from corolla.http.messages import CountTokensRequest, MessageRequest
from corolla.http.placement_stream import PlacementStream
from corolla.http.readings import (
    EmbeddingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from corolla.http.response_replies import ItemList, Reply, input_items
from corolla.http.responses import (
    ItemsQuery,
    ReplayQuery,
    ResponseRequest,
    StoredTurn,
    new_response_id,
    not_stored,
)
from corolla.http.tokenization import (
    Detokenized,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerFacts,
)
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2

Request = TypeVar("Request", pb.EmbedRequest, pb.ScoreRequest)
Result = TypeVar("Result")

_MAX_PARALLEL: Final = 16
_MAX_PARALLEL_BYTES: Final = 1 << 20


class ModelFacts(BaseModel):
    """A model that the service has, in OpenAI's dialect and in Anthropic's."""

    id: str
    object: str = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: datetime
    owned_by: str = "corolla"
    max_model_len: int = Field(description="Tokens of its context.")
    ready: bool = Field(description="Whether every block has a live server now.")


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelFacts]


class SessionRequest(Body):
    """A request for a new session."""

    model: ModelName = ""


class SessionFacts(BaseModel):
    """A session. Only the tenant that created it can see and use it."""

    id: str
    object: Literal["session"] = "session"
    model: str
    num_tokens: int = Field(description="Tokens of prompts and answers so far.")
    num_turns: int
    busy: bool = Field(description="Whether a turn is running.")
    expires_in_seconds: float = Field(description="Seconds until it expires when it stays idle.")


class DeletedSession(BaseModel):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Health(BaseModel):
    status: Literal["SERVING"] = "SERVING"


class HttpRoutes:
    """The behaviours of all routes.

    Args:
        model: the name of the model that is served.
        is_serving: returns whether the service takes requests.
        placement: the stream for watchers.
        max_reply_bytes: how large a reply may be that is not streamed.
    """

    def __init__(
        self,
        servicer: GenerationServicer,
        model: str,
        is_serving: Callable[[], bool],
        placement: PlacementStream,
        max_reply_bytes: int,
    ) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._servicer = servicer
        self._model = model
        self._is_serving = is_serving
        self._placement = placement
        self._created = now_s()

    async def health(self, exchange: Exchange, call: object) -> None:
        """Says whether the service takes requests."""
        if not self._is_serving():
            raise ServiceUnavailable("the service does not take requests now")
        await _reply(exchange, Health())

    async def list_models(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Lists the models that the service has."""
        found = await self._servicer.ListModels(pb.ListModelsRequest(), call)
        await _reply(exchange, ModelList(data=[self._facts(each) for each in found.models]))

    async def get_model(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Describes a model."""
        request = pb.GetModelRequest(model=exchange.request.path_params["model"])
        await _reply(exchange, self._facts(await self._servicer.GetModel(request, call)))

    async def chat(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Answers a conversation."""
        body = await exchange.read(ChatCompletionRequest)
        request = body.as_protocol()
        options = {"has_logprobs": bool(body.logprobs), "has_token_ids": body.has_token_ids}
        if body.stream:
            chunks = self._servicer.ChatStream(request, call, ANY_ROOM)
            events = chat_replies.events(
                chunks,
                body.model or self._model,
                has_usage=body.has_usage,
                has_continuous_usage=body.has_continuous_usage,
                **options,
            )
            with body.in_own_words():
                await exchange.stream(events)
            return
        with body.in_own_words():
            answer = await self._servicer.Chat(request, call, ReplyRoom(CHATS, self._max_reply_bytes))
        pieces = chat_replies.reply(answer, **options)
        del answer  # its caller may take minutes to read the pieces
        await exchange.reply_in_pieces(pieces)

    async def create_message(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Answers a conversation in Anthropic's dialect."""
        body = await exchange.read(MessageRequest)
        request = body.as_protocol()
        if body.stream:
            chunks = self._servicer.ChatStream(request, call, ANY_ROOM)
            events = message_replies.events(chunks, body.model or self._model, shows_thinking=body.thinks)
            with body.in_own_words():
                await exchange.stream(events)
            return
        with body.in_own_words():
            answer = await self._servicer.Chat(request, call, ReplyRoom(CHATS, self._max_reply_bytes))
        await exchange.reply(message_replies.reply(answer, shows_thinking=body.thinks))

    async def count_tokens(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Counts the tokens of a conversation in Anthropic's dialect."""
        body = await exchange.read(CountTokensRequest)
        with body.in_own_words():
            found = await self._servicer.Tokenize(body.as_protocol(), call)
        await _reply(exchange, message_replies.TokenCount(input_tokens=len(found.token_ids)))

    async def respond(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Answers a conversation. The service stores it unless the request forbids that."""
        body = await exchange.read(ResponseRequest)
        async with self._turn(body, call) as (turn, earlier, is_kept):
            request = body.as_protocol(turn, earlier)
            reply = Reply(body, turn.response_id if turn is not None else new_response_id(), body.model or self._model)
            call.note = reply.note
            if body.stream:
                room = ReplyRoom(STREAMED_RESPONSES, self._max_reply_bytes) if body.has_logprobs else ANY_ROOM
                events = reply.events(_until_kept(self._servicer.ChatStream(request, call, room), is_kept))
                with body.in_own_words(len(earlier)):
                    await exchange.stream(events)
                return
            with body.in_own_words(len(earlier)):
                answer = await self._servicer.Chat(request, call, ReplyRoom(RESPONSES, self._max_reply_bytes))
            is_kept.set()
            await exchange.reply_in_pieces(reply.whole(answer))

    @asynccontextmanager
    async def _turn(
        self, body: ResponseRequest, call: Call[KeyHolder]
    ) -> AsyncIterator[tuple[StoredTurn | None, Sequence[pb.ChatMessage], asyncio.Event]]:
        """Yields the turn of a response, None if the response is not stored, and the event to set once it is stored.

        A response that continues the newest one of its conversation is the next turn of the session. One that continues
        an earlier one is the first turn of a session of its own, with the messages up to there, which are yielded, too.

        If the event is not set at the end of the context, a session that was created for the turn is deleted.
        """
        is_kept = asyncio.Event()
        earlier: Sequence[pb.ChatMessage] = ()
        if body.previous_response_id is not None:
            with body.in_own_words():
                previous = StoredTurn.of(body.previous_response_id)
                record, finished = await self._servicer.continued_turn(previous.session_id, previous.number, call)
            is_newest = record.num_turns == previous.number and not record.busy
            if body.is_stored and (finished is None or is_newest):
                yield StoredTurn(previous.session_id, previous.number + 1), (), is_kept
                return
            num_messages = len(record.transcript) if finished is None else finished.num_messages
            earlier = record.transcript[:num_messages]
        if not body.is_stored:
            yield None, earlier, is_kept
        else:
            created = pb.CreateSessionRequest(model=body.model)
            with body.in_own_words():
                session = await self._servicer.create_session_of_turn(created, call)
            try:
                yield StoredTurn(session.session_id, 1), earlier, is_kept
            finally:
                if not is_kept.is_set():
                    with suppress(CorollaError):
                        await self._servicer.DeleteSession(pb.DeleteSessionRequest(session_id=session.session_id), call)

    async def get_response(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Reads a stored response, or sends its events again."""
        query = exchange.query(ReplayQuery)
        messages, finished, model = await self._response(exchange, call)
        answer = pb.ChatResponse(
            message=messages[-1],
            finish_reason=finish_reason(FinishReason(finished.finish_reason)),
            usage=pb.Usage(prompt_tokens=finished.prompt_tokens, completion_tokens=finished.completion_tokens),
        )
        reply = Reply.of_turn(exchange.request.path_params["response_id"], finished, model)
        if query.stream:
            await exchange.stream(reply.replayed(answer, -1 if query.starting_after is None else query.starting_after))
        else:
            await exchange.reply_in_pieces(reply.whole(answer))

    async def list_input_items(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Lists the items of the conversation before a stored response."""
        query = exchange.query(ItemsQuery)
        (*earlier, _), _, _ = await self._response(exchange, call)
        page, has_more = query.page(input_items(earlier, exchange.request.path_params["response_id"]))
        first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        await _reply(exchange, ItemList(data=list(page), first_id=first_id, last_id=last_id, has_more=has_more))

    async def _response(
        self, exchange: Exchange, call: Call[KeyHolder]
    ) -> tuple[Sequence[pb.ChatMessage], router_pb2.FinishedTurn, str]:
        """The conversation up to a stored response, its turn, and its model. Raises ResourceNotFound."""
        turn = StoredTurn.of(exchange.request.path_params["response_id"])
        record, finished = await self._servicer.stored_turn(turn.session_id, turn.number, call)
        if finished is None or not finished.num_messages:
            raise not_stored()
        return record.transcript[: finished.num_messages], finished, record.model

    async def delete_response(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Deletes a stored response; the last one of a conversation with its session."""
        response_id = exchange.request.path_params["response_id"]
        turn = StoredTurn.of(response_id)
        await self._servicer.delete_turn(turn.session_id, turn.number, call)
        await _reply(exchange, DeletedResponse(id=response_id))

    async def complete(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Completes prompts."""
        body = await exchange.read(CompletionRequest)
        requests = self._checked(body, call)
        options = {"has_logprobs": body.logprobs is not None, "has_token_ids": body.has_token_ids}
        if body.stream:
            room = ReplyRoom(COMPLETIONS, self._max_reply_bytes // len(requests), is_streamed=True)
            streams = [self._servicer.GenerateStream(each, call, room) for each in requests]
            chunks = merge([_in_words_of(body, number, each) for number, each in enumerate(streams)])
            await exchange.stream(
                completions.events(
                    chunks,
                    body.model or self._model,
                    body.num_completions,
                    has_usage=body.has_usage,
                    has_continuous_usage=body.has_continuous_usage,
                    **options,
                )
            )
            return
        # All prompts are completed at the same time; the first failure ends the others.
        room = ReplyRoom(COMPLETIONS, self._max_reply_bytes // len(requests))
        calls = [_in_words_of(body, number, self._generated(each, call, room)) for number, each in enumerate(requests)]
        found = {index: each async for index, each in merge(calls)}
        responses = [found.pop(index) for index in range(len(requests))]
        pieces = completions.reply(responses, body.num_completions, **options)
        del responses
        await exchange.reply_in_pieces(pieces)

    async def embed(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Makes vectors of texts from the model's last hidden states."""
        body = await exchange.read(EmbeddingRequest)
        num_bytes = body.most_reply_bytes(self._servicer.hidden_size)
        ReplyRoom(COMPLETIONS, self._max_reply_bytes).check_bytes(num_bytes, "input")
        exchange.held.expect_reply(num_bytes)
        found = await _all(body, body.as_protocol(), lambda each: self._servicer.Embed(each, call))
        pieces = readings.embeddings(body, found)
        del found
        await exchange.reply_in_pieces(pieces)

    async def score(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Tells how probable queries are after documents."""
        body = await exchange.read(ScoreRequest)
        found = await _all(body, body.as_protocol(), lambda each: self._servicer.Score(each, call, ANY_ROOM))
        await _reply(exchange, ScoreList.of(found))

    async def rerank(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Orders documents by how probable a query is after each of them."""
        body = await exchange.read(RerankRequest)
        found = await _all(body, body.as_protocol(), lambda each: self._servicer.Score(each, call, ANY_ROOM))
        await _reply(exchange, Ranking.of(body, found))

    async def describe_tokenizer(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Describes the tokenizer."""
        await _reply(exchange, TokenizerFacts.model_validate(self._servicer.tokenizer_facts(call)))

    async def tokenize(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Splits a text or a conversation into tokens."""
        body = await exchange.read(TokenizeRequest)
        request = body.as_protocol()
        with body.in_own_words():
            found = await self._servicer.Tokenize(request, call)
        model = await self._servicer.GetModel(pb.GetModelRequest(model=self._model), call)
        pieces = tokenization.reply(found, model.context_length, has_texts=body.return_token_strs)
        del found
        await exchange.reply_in_pieces(pieces)

    async def detokenize(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Joins tokens to a text."""
        body = await exchange.read(DetokenizeRequest)
        with body.in_own_words():
            found = await self._servicer.Detokenize(body.as_protocol(), call)
        await _reply(exchange, Detokenized(prompt=found.text))

    async def create_session(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Creates a session."""
        body = await exchange.read(SessionRequest, may_be_empty=True)
        created = await self._servicer.CreateSession(pb.CreateSessionRequest(model=body.model), call)
        await _reply(exchange, _session_facts(created))

    async def get_session(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Describes a session."""
        request = pb.GetSessionRequest(session_id=exchange.request.path_params["session_id"])
        await _reply(exchange, _session_facts(await self._servicer.GetSession(request, call)))

    async def delete_session(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Deletes a session."""
        session_id = exchange.request.path_params["session_id"]
        await self._servicer.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), call)
        await _reply(exchange, DeletedSession(id=session_id))

    async def watch_placement(self, exchange: Exchange, call: Call[KeyHolder]) -> None:
        """Streams which servers hold which blocks, at first and after each change, until the caller leaves."""
        call.caller.check(None, *self._servicer.model_names)
        await exchange.stream(self._placement.watch(call.caller), is_watch=True)

    def _checked(self, body: CompletionRequest, call: Call[KeyHolder]) -> list[pb.GenerateRequest]:
        """A request for each prompt. What they share is only repeated after the service has accepted the first one."""
        requests = body.as_protocol()
        first = next(requests)
        with body.in_own_words(0):
            self._servicer.check_text(first, call)
        return [first, *requests]

    async def _generated(
        self, request: pb.GenerateRequest, call: Call[KeyHolder], room: ReplyRoom
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        yield await self._servicer.Generate(request, call, room)

    def _facts(self, model: pb.Model) -> ModelFacts:
        return ModelFacts(
            id=model.name,
            display_name=model.name,
            created=self._created,
            created_at=datetime.fromtimestamp(self._created, UTC),
            max_model_len=model.context_length,
            ready=model.ready,
        )


async def _until_kept(
    chunks: AsyncGenerator[pb.ChatChunk, None], is_kept: asyncio.Event
) -> AsyncGenerator[pb.ChatChunk, None]:
    """Yields the chunks, and sets the event at the answer's end: the turn is stored before its end is sent."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.finish_reason:
                is_kept.set()
            yield chunk


async def _in_words_of(body: Body, number: int, results: AsyncGenerator[Result, None]) -> AsyncGenerator[Result, None]:
    """Yields the results of one of a body's requests."""
    with body.in_own_words(number):
        async with aclosing(results):
            async for each in results:
                yield each


async def _all(body: Body, requests: Iterator[Request], ask: Callable[[Request], Awaitable[Result]]) -> list[Result]:
    """Asks for a body's requests, a few at a time, and returns the results in order. The first failure ends the others.

    The requests may repeat a long text, so each is made when its turn comes, and the first one is tried alone.
    """
    first = next(requests)
    with body.in_own_words(0):
        results = {0: await ask(first)}
    pending = enumerate(requests, start=1)

    async def work() -> None:
        for index, request in pending:
            with body.in_own_words(index):
                results[index] = await ask(request)

    most = min(_MAX_PARALLEL, max(1, _MAX_PARALLEL_BYTES // first.ByteSize()))
    tasks = [asyncio.create_task(work()) for _ in range(most)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [results[index] for index in range(len(results))]


async def _reply(exchange: Exchange, value: BaseModel) -> None:
    await exchange.reply(value.model_dump_json().encode())


def _session_facts(session: pb.Session) -> SessionFacts:
    return SessionFacts(
        id=session.session_id,
        model=session.model,
        num_tokens=session.num_tokens,
        num_turns=session.num_turns,
        busy=session.busy,
        expires_in_seconds=session.expires_in_seconds,
    )
