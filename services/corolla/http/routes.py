"""The operations of HTTP: each one converts a body, calls the servicer of gRPC, and converts its answer."""

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
from corolla.http import chat_replies, completions, message_replies, readings, response_replies, tokenization
from corolla.http.answers import now_s
from corolla.http.chat import ChatCompletionRequest
from corolla.http.completions import CompletionRequest
from corolla.http.errors import ANTHROPIC
from corolla.http.exchange import Exchange
from corolla.http.fields import Body, ModelName
from corolla.http.messages import CountTokensRequest, MessageRequest
from corolla.http.operations import operation
from corolla.http.placement_facts import PlacementFacts
from corolla.http.placement_stream import PlacementStream
from corolla.http.readings import EmbeddingRequest, Ranking, RerankRequest, ScoreList, ScoreRequest
from corolla.http.response_replies import Reply, input_items
from corolla.http.responses import ItemsQuery, ReplayQuery, ResponseRequest, StoredTurn, new_response_id, not_stored
from corolla.http.tokenization import Detokenized, DetokenizeRequest, TokenizeRequest, TokenizerFacts
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2

Request = TypeVar("Request", pb.EmbedRequest, pb.ScoreRequest)
Result = TypeVar("Result")
KeyCall = Call[KeyHolder]
Pieces = AsyncGenerator[str, None]
"""The pieces of a reply, between which other tasks run."""

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
    """The behaviours of all operations, in the order of the document.

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

    @operation("GET", "/v1/models", ModelList)
    async def list_models(self, call: KeyCall) -> ModelList:
        """Lists the models that the service has."""
        found = await self._servicer.ListModels(pb.ListModelsRequest(), call)
        return ModelList(data=[self._facts(each) for each in found.models])

    @operation("GET", "/v1/models/{model}", ModelFacts)
    async def get_model(self, call: KeyCall, model: str) -> ModelFacts:
        """Describes a model."""
        return self._facts(await self._servicer.GetModel(pb.GetModelRequest(model=model), call))

    @operation("POST", "/v1/chat/completions", chat_replies.ChatCompletion, streams=True)
    async def chat(self, exchange: Exchange, call: KeyCall, body: ChatCompletionRequest) -> Pieces | None:
        """Answers a conversation."""
        request = body.as_protocol()
        options = {"has_logprobs": bool(body.logprobs), "has_token_ids": body.has_token_ids}
        with body.in_own_words():
            if body.stream:
                chunks = self._servicer.ChatStream(request, call, ANY_ROOM)
                model = body.model or self._model
                await exchange.stream(chat_replies.events(chunks, model, **body.streamed_usage, **options))
                return None
            answer = await self._servicer.Chat(request, call, ReplyRoom(CHATS, self._max_reply_bytes))
        return chat_replies.reply(answer, **options)

    @operation("POST", "/v1/completions", completions.Completion, streams=True)
    async def complete(self, exchange: Exchange, call: KeyCall, body: CompletionRequest) -> Pieces | None:
        """Completes prompts."""
        requests = self._checked(body, call)
        options = {"has_logprobs": body.logprobs is not None, "has_token_ids": body.has_token_ids}
        room = ReplyRoom(COMPLETIONS, self._max_reply_bytes // len(requests), is_streamed=bool(body.stream))
        if body.stream:
            streams = [self._servicer.GenerateStream(each, call, room) for each in requests]
            chunks = merge([_in_words_of(body, number, each) for number, each in enumerate(streams)])
            model = body.model or self._model
            options |= body.streamed_usage
            await exchange.stream(completions.events(chunks, model, body.num_completions, **options))
            return None
        # All prompts are completed at the same time; the first failure ends the others.
        calls = [_in_words_of(body, number, self._generated(each, call, room)) for number, each in enumerate(requests)]
        found = {index: each async for index, each in merge(calls)}
        responses = [found.pop(index) for index in range(len(requests))]
        return completions.reply(responses, body.num_completions, **options)

    @operation("POST", "/v1/responses", response_replies.Response, streams=True)
    async def respond(self, exchange: Exchange, call: KeyCall, body: ResponseRequest) -> Pieces | None:
        """Answers a conversation. The service stores it unless the request forbids that."""
        async with self._turn(body, call) as (turn, earlier, is_kept):
            request = body.as_protocol(turn, earlier)
            reply = Reply(body, turn.response_id if turn is not None else new_response_id(), body.model or self._model)
            call.note = reply.note
            with body.in_own_words(len(earlier)):
                if body.stream:
                    room = ReplyRoom(STREAMED_RESPONSES, self._max_reply_bytes) if body.has_logprobs else ANY_ROOM
                    chunks = _until_kept(self._servicer.ChatStream(request, call, room), is_kept)
                    await exchange.stream(reply.events(chunks))
                    return None
                answer = await self._servicer.Chat(request, call, ReplyRoom(RESPONSES, self._max_reply_bytes))
            is_kept.set()
        return reply.whole(answer)

    @operation("POST", "/v1/messages", message_replies.Message, streams=True, dialect=ANTHROPIC)
    async def create_message(
        self, exchange: Exchange, call: KeyCall, body: MessageRequest
    ) -> message_replies.Message | None:
        """Answers a conversation in Anthropic's dialect."""
        request = body.as_protocol()
        with body.in_own_words():
            if body.stream:
                chunks, model = self._servicer.ChatStream(request, call, ANY_ROOM), body.model or self._model
                await exchange.stream(message_replies.events(chunks, model, shows_thinking=body.thinks))
                return None
            answer = await self._servicer.Chat(request, call, ReplyRoom(CHATS, self._max_reply_bytes))
        return message_replies.reply(answer, shows_thinking=body.thinks)

    @operation("POST", "/v1/messages/count_tokens", message_replies.TokenCount, dialect=ANTHROPIC)
    async def count_tokens(self, call: KeyCall, body: CountTokensRequest) -> message_replies.TokenCount:
        """Counts the tokens of a conversation in Anthropic's dialect."""
        with body.in_own_words():
            found = await self._servicer.Tokenize(body.as_protocol(), call)
        return message_replies.TokenCount(input_tokens=len(found.token_ids))

    @operation("GET", "/v1/responses/{response_id}", response_replies.Response, streams=True)
    async def get_response(
        self, exchange: Exchange, call: KeyCall, response_id: str, query: ReplayQuery
    ) -> Pieces | None:
        """Reads a stored response, or sends its events again."""
        messages, finished, model = await self._response(response_id, call)
        answer = pb.ChatResponse(
            message=messages[-1],
            finish_reason=finish_reason(FinishReason(finished.finish_reason)),
            usage=pb.Usage(prompt_tokens=finished.prompt_tokens, completion_tokens=finished.completion_tokens),
        )
        reply = Reply.of_turn(response_id, finished, model)
        if not query.stream:
            return reply.whole(answer)
        await exchange.stream(reply.replayed(answer, -1 if query.starting_after is None else query.starting_after))
        return None

    @operation("DELETE", "/v1/responses/{response_id}", DeletedResponse)
    async def delete_response(self, call: KeyCall, response_id: str) -> DeletedResponse:
        """Deletes a stored response; the last one of a conversation with its session."""
        turn = StoredTurn.from_response_id(response_id)
        await self._servicer.delete_turn(turn.session_id, turn.number, call)
        return DeletedResponse(id=response_id)

    @operation("GET", "/v1/responses/{response_id}/input_items", response_replies.ItemList)
    async def list_input_items(self, call: KeyCall, response_id: str, query: ItemsQuery) -> response_replies.ItemList:
        """Lists the items of the conversation before a stored response."""
        (*earlier, _), _, _ = await self._response(response_id, call)
        page, has_more = query.page(input_items(earlier, response_id))
        first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return response_replies.ItemList(data=list(page), first_id=first_id, last_id=last_id, has_more=has_more)

    @operation("POST", "/v1/sessions", SessionFacts, needs_body=False)
    async def create_session(self, call: KeyCall, body: SessionRequest) -> SessionFacts:
        """Creates a session."""
        return _session_facts(await self._servicer.CreateSession(pb.CreateSessionRequest(model=body.model), call))

    @operation("GET", "/v1/sessions/{session_id}", SessionFacts)
    async def get_session(self, call: KeyCall, session_id: str) -> SessionFacts:
        """Describes a session."""
        return _session_facts(await self._servicer.GetSession(pb.GetSessionRequest(session_id=session_id), call))

    @operation("DELETE", "/v1/sessions/{session_id}", DeletedSession)
    async def delete_session(self, call: KeyCall, session_id: str) -> DeletedSession:
        """Deletes a session."""
        await self._servicer.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), call)
        return DeletedSession(id=session_id)

    @operation("POST", "/tokenize", tokenization.Tokenized)
    async def tokenize(self, call: KeyCall, body: TokenizeRequest) -> Pieces:
        """Splits a text or a conversation into tokens."""
        request = body.as_protocol()
        with body.in_own_words():
            found = await self._servicer.Tokenize(request, call)
        model = await self._servicer.GetModel(pb.GetModelRequest(model=self._model), call)
        return tokenization.reply(found, model.context_length, has_texts=body.return_token_strs)

    @operation("POST", "/detokenize", Detokenized)
    async def detokenize(self, call: KeyCall, body: DetokenizeRequest) -> Detokenized:
        """Joins tokens to a text."""
        with body.in_own_words():
            found = await self._servicer.Detokenize(body.as_protocol(), call)
        return Detokenized(prompt=found.text)

    @operation("GET", "/tokenizer_info", TokenizerFacts)
    async def describe_tokenizer(self, call: KeyCall) -> TokenizerFacts:
        """Describes the tokenizer."""
        return TokenizerFacts.model_validate(self._servicer.tokenizer_facts(call))

    @operation("POST", "/v1/embeddings", readings.EmbeddingList)
    async def embed(self, exchange: Exchange, call: KeyCall, body: EmbeddingRequest) -> Pieces:
        """Makes vectors of texts from the model's last hidden states."""
        num_bytes = body.most_reply_bytes(self._servicer.hidden_size)
        ReplyRoom(COMPLETIONS, self._max_reply_bytes).check_bytes(num_bytes, "input")
        exchange.held.expect_reply(num_bytes)
        found = await _all(body, body.as_protocol(), lambda each: self._servicer.Embed(each, call))
        return readings.embeddings(body, found)

    @operation("POST", "/v1/score", ScoreList)
    async def score(self, call: KeyCall, body: ScoreRequest) -> ScoreList:
        """Tells how probable queries are after documents."""
        found = await _all(body, body.as_protocol(), lambda each: self._servicer.Score(each, call, ANY_ROOM))
        return ScoreList.from_replies(found)

    @operation("POST", "/v1/rerank", Ranking)
    async def rerank(self, call: KeyCall, body: RerankRequest) -> Ranking:
        """Orders documents by how probable a query is after each of them."""
        found = await _all(body, body.as_protocol(), lambda each: self._servicer.Score(each, call, ANY_ROOM))
        return Ranking.from_replies(body, found)

    @operation("GET", "/health", Health, is_open=True)
    async def health(self) -> Health:
        """Says whether the service takes requests."""
        if not self._is_serving():
            raise ServiceUnavailable("the service does not take requests now")
        return Health()

    @operation("GET", "/v1/placement", PlacementFacts, is_watch=True)
    async def watch_placement(self, exchange: Exchange, call: KeyCall) -> None:
        """Streams which servers hold which blocks, at first and after each change, until the caller leaves."""
        call.caller.check(None, *self._servicer.model_names)
        await exchange.stream(self._placement.watch(call.caller), is_watch=True)

    @asynccontextmanager
    async def _turn(
        self, body: ResponseRequest, call: KeyCall
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
                previous = StoredTurn.from_response_id(body.previous_response_id)
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

    async def _response(
        self, response_id: str, call: KeyCall
    ) -> tuple[Sequence[pb.ChatMessage], router_pb2.FinishedTurn, str]:
        """The conversation up to a stored response, its turn, and its model. Raises ResourceNotFound."""
        turn = StoredTurn.from_response_id(response_id)
        record, finished = await self._servicer.stored_turn(turn.session_id, turn.number, call)
        if finished is None or not finished.num_messages:
            raise not_stored()
        return record.transcript[: finished.num_messages], finished, record.model

    def _checked(self, body: CompletionRequest, call: KeyCall) -> list[pb.GenerateRequest]:
        """A request for each prompt. What they share is only repeated after the service has accepted the first one."""
        requests = body.as_protocol()
        first = next(requests)
        with body.in_own_words(0):
            self._servicer.check_text(first, call)
        return [first, *requests]

    async def _generated(
        self, request: pb.GenerateRequest, call: KeyCall, room: ReplyRoom
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


def _session_facts(session: pb.Session) -> SessionFacts:
    facts = {name: getattr(session, name) for name in SessionFacts.model_fields if hasattr(session, name)}
    return SessionFacts(id=session.session_id, **facts)
