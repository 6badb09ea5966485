"""The servicer of `GenerationService`: it checks permissions, parses messages, and returns or streams the answers."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from corolla.chain.identity import SessionIdentity
from corolla.chain.placement import PlacementWatch
from corolla.chain.prompt_readout import PromptReadout
from corolla.chain.session import ChainSessions
from corolla.chassis.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    ResourceNotFound,
    ScopeDenied,
    SessionNotFound,
)
from corolla.chassis.handlers import Call
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import trace_parent
from corolla.client.adapters import ModelNames
from corolla.client.api import conversations, replies, requests
from corolla.client.api.keys import Scope
from corolla.client.api.requests import REQUEST_ID, AnyMessage, ChatRequest, RequestParser, TextRequest
from corolla.client.api.tenants import KeyHolder
from corolla.client.generation.admission import Admission, Caller
from corolla.client.generation.answering import Answering
from corolla.client.generation.request import AnyRequest
from corolla.client.output_parsing.default_tools import written_out
from corolla.client.output_parsing.deltas import Delta, joined
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.reply_sizes import ANY_ROOM, PROTOBUF, ReplyRoom, stated_bytes
from corolla.client.text.chat import ChatTemplate
from corolla.client.text.conversation import ChatSetting, check_conversation, with_instructions
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.transcripts import Transcripts
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2
from corolla.v1.common_pb2 import ChatMessage

Answers = AsyncGenerator[tuple[int, Delta], None]
StoredTurn = tuple[router_pb2.SessionRecord, router_pb2.FinishedTurn | None]
"""A session, and one of its finished turns; None if an earlier version of the service made that turn."""

MAX_TOKENIZED_BYTES: Final = 1 << 20
MAX_DETOKENIZED: Final = 1 << 18
_PIECE_TOKENS: Final = 1 << 14

_WITHOUT_NAME: Final = (pb.ScoreRequest, pb.EmbedRequest)
"""Requests without an answer; callers do not name them, since there is nothing to continue."""


@dataclass(frozen=True, slots=True)
class CallBounds:
    """The bounds of a call.

    Attributes:
        farewell_s: how many seconds before a call's deadline the service stops waiting for a chain, so that the error
            still reaches the caller.
        max_reply_bytes: how large a reply to gRPC may be.
    """

    farewell_s: float
    max_reply_bytes: int


@dataclass(frozen=True, slots=True)
class GenerationServicer:
    """Serves `GenerationService` to callers of gRPC and HTTP.

    Args:
        model: the reply of GetModel, without `ready`.
        tokenizations: admits calls of Tokenize and Detokenize.
        names: the names of the model.
    """

    model: pb.Model
    quotas: QuotaEnforcer
    answering: Answering
    tokenizations: Admission
    transcripts: Transcripts
    sessions: ChainSessions
    placement: PlacementWatch
    tokenizer: TextTokenizer
    chat: ChatTemplate
    names: ModelNames
    requests: RequestParser
    bounds: CallBounds

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that callers may give as the model."""
        return self.names.all_names

    @property
    def hidden_size(self) -> int:
        """The number of numbers in an embedding."""
        return self.model.hidden_size

    # --- text ---------------------------------------------------------------------------------------------------

    # HTTP passes the room for its own reply; that of gRPC follows from the call.

    def check_text(self, message: pb.GenerateRequest, call: Call[KeyHolder]) -> None:
        """Checks a request as Generate does before it does any work. Raises the same errors."""
        self.requests.text(message, *self._caller(Scope.GENERATE, message, call), ANY_ROOM)

    async def Generate(
        self, message: pb.GenerateRequest, call: Call[KeyHolder], reply: ReplyRoom | None = None
    ) -> pb.GenerateResponse:
        caller = self._caller(Scope.GENERATE, message, call)
        request = self.requests.text(message, *caller, reply or self._reply_room(call))
        answers = await _collected(self._text_answers(request), call)
        response = pb.GenerateResponse(
            model=self.names.with_adapter(request.adapter), usage=request.caller.shown_usage()
        )
        for index, answer in answers:
            await replies.write_completion(response.completions.add(index=index), self.tokenizer, answer)
            if (echoed := await self._echoed(request, answer)) is not None:
                response.prompt.MergeFrom(echoed)
        return response

    async def GenerateStream(
        self, message: pb.GenerateRequest, call: Call[KeyHolder], reply: ReplyRoom | None = None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        caller = self._caller(Scope.GENERATE, message, call, is_streamed=True)
        request = self.requests.text(message, *caller, reply or self._reply_room(call, is_streamed=True))
        num_open = request.num_completions
        async with aclosing(self._text_answers(request)) as deltas:
            async for index, delta in deltas:
                call.caller.check_again()
                num_open -= delta.finish_reason is not None
                has_usage = not num_open or request.caller.has_continuous_usage
                yield pb.GenerateChunk(
                    index=index,
                    token_ids=[token.token_id for token in delta.tokens],
                    text_delta=delta.text,
                    logprobs=replies.logprobs(self.tokenizer, delta.tokens),
                    finish_reason=replies.finish_reason(delta.finish_reason),
                    usage=request.caller.shown_usage() if has_usage else None,
                    prompt=await self._echoed(request, delta),
                )

    async def _echoed(self, request: TextRequest, delta: Delta) -> pb.EchoedPrompt | None:
        readout = delta.readout
        return None if readout is None else await replies.echoed_prompt(self.tokenizer, request.prompt, readout)

    async def Score(
        self, message: pb.ScoreRequest, call: Call[KeyHolder], reply: ReplyRoom | None = None
    ) -> pb.ScoreResponse:
        caller = self._caller(Scope.GENERATE, message, call)
        request = self.requests.score(message, *caller, reply or self._reply_room(call))
        encode = partial(self.tokenizer.encode, max_tokens=self.model.context_length)
        readout = await self._read_out(request, call, lambda: request.prompt.encoded(encode))
        model, usage = self.names.with_adapter(request.adapter), request.caller.shown_usage()
        return await replies.score(self.tokenizer, model, readout, message.logprobs, usage)

    async def Embed(self, message: pb.EmbedRequest, call: Call[KeyHolder]) -> pb.EmbedResponse:
        request = self.requests.embedding(message, *self._caller(Scope.GENERATE, message, call))
        readout = await self._read_out(request, call, lambda: self._encoded(request.prompt))
        return pb.EmbedResponse(
            model=self.names.with_adapter(request.adapter),
            embedding=replies.embedding(readout, message),
            usage=request.caller.shown_usage(),
        )

    async def _read_out(
        self, request: AnyRequest, call: Call[KeyHolder], encode: Callable[[], Sequence[int]]
    ) -> PromptReadout:
        """Processes a request without an answer."""

        def next_prompt(record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
            return 0, encode()

        answers = self.answering.answer(request, next_prompt)
        ((_, delta),) = await _collected(answers, call)
        if delta.readout is None:
            raise InternalError("a request without an answer came back without a readout")
        return delta.readout

    def _encoded(self, prompt: str | Sequence[int], *, is_first: bool = True) -> Sequence[int]:
        """The token ids of a prompt. `is_first`: whether nothing precedes it."""
        if not isinstance(prompt, str):
            return prompt
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=is_first, max_tokens=self.model.context_length)
        if not token_ids and is_first:
            token_ids = self.tokenizer.first_ids
        if not token_ids:
            raise InvalidRequest("text", "must give at least one token")
        return token_ids

    def _text_answers(self, request: TextRequest) -> Answers:
        def next_prompt(record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
            if record.transcript:
                raise InvalidRequest("session_id", "this session holds a conversation; a prompt cannot continue it")
            new_ids = self._encoded(request.prompt, is_first=not record.token_log)
            return len(record.token_log), [*record.token_log, *new_ids]

        return self.answering.answer(request, next_prompt)

    # --- conversations --------------------------------------------------------------------------------------------

    async def Chat(
        self, message: pb.ChatRequest, call: Call[KeyHolder], reply: ReplyRoom | None = None
    ) -> pb.ChatResponse:
        caller = self._caller(Scope.CHAT, message, call)
        request = self.requests.chat(message, *caller, reply or self._reply_room(call))
        answers = await _collected(self._chat_answers(request), call)
        response = pb.ChatResponse(model=self.names.with_adapter(request.adapter), usage=request.caller.shown_usage())
        for index, answer in answers:
            written = response.others.add(index=index) if index else response
            await replies.write_chat(written, self.tokenizer, answer)
        return response

    async def ChatStream(
        self, message: pb.ChatRequest, call: Call[KeyHolder], reply: ReplyRoom | None = None
    ) -> AsyncGenerator[pb.ChatChunk, None]:
        caller = self._caller(Scope.CHAT, message, call, is_streamed=True)
        request = self.requests.chat(message, *caller, reply or self._reply_room(call, is_streamed=True))
        num_open = request.num_completions
        async with aclosing(self._chat_answers(request)) as deltas:
            async for index, delta in deltas:
                call.caller.check_again()
                num_open -= delta.finish_reason is not None
                has_usage = not num_open or request.caller.has_continuous_usage
                usage = request.caller.shown_usage() if has_usage else None
                yield replies.chat_chunk(self.tokenizer, index, delta, usage)

    def _chat_answers(self, request: ChatRequest) -> Answers:
        messages, setting = request.prompt.messages, request.prompt.setting
        instructions = request.prompt.instructions

        def next_prompt(record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
            if record.token_log and not record.transcript:
                raise InvalidRequest("session_id", "this session holds plain text; messages cannot continue it")
            request.prompt.check_turns(record.num_turns)
            earlier: Sequence[ChatMessage] = record.transcript
            check_conversation([*earlier, *messages] if setting.continues_last else messages, setting)
            earlier, new = with_instructions(instructions, earlier, messages)
            earlier, new, shown = self._with_tools_shown(earlier, new, setting)
            return self.chat.next_turn_ids(record.token_log, earlier, new, shown, max_tokens=self.model.context_length)

        def record_turn(record: router_pb2.SessionRecord, answer: ChatMessage) -> None:
            conversations.record_messages(record, messages, answer, setting, self.requests.output_format.reasoning)

        return self.answering.answer(request, next_prompt, record_turn)

    def _with_tools_shown(
        self, earlier: Sequence[ChatMessage], new: Sequence[ChatMessage], setting: ChatSetting
    ) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage], ChatSetting]:
        """The conversation, in whose texts the tools stand if the model's chat template knows no tools."""
        if not setting.tools or self.chat.knows_tools:
            return earlier, new, setting
        shown = written_out(earlier, new, setting.tools, self.requests.output_format.calls)
        return *shown, replace(setting, tools=())

    # --- sessions -------------------------------------------------------------------------------------------------

    async def CreateSession(self, request: pb.CreateSessionRequest, call: Call[KeyHolder]) -> pb.Session:
        adapter = self.names.adapter_of(request.model, request.adapter)
        tenant = self._tenant(call, Scope.SESSIONS, adapter)
        await self.quotas.check_request(tenant)
        return await self._new_session(tenant, adapter)

    async def create_session_of_turn(self, request: pb.CreateSessionRequest, call: Call[KeyHolder]) -> pb.Session:
        """Creates a session for a turn that follows at once and counts as the request for both."""
        adapter = self.names.adapter_of(request.model, request.adapter)
        return await self._new_session(self._tenant(call, Scope.SESSIONS, adapter), adapter)

    async def _new_session(self, tenant: str, adapter: str) -> pb.Session:
        version = await self.names.resolve(adapter, tenant)
        limits = self.quotas.limits(tenant)
        with self.quotas.counted_refusals():
            record = await self.transcripts.create(tenant, limits.stored_sessions, limits.stored_session_bytes, version)
        return replies.session(record, self.names.model)

    async def GetSession(self, request: pb.GetSessionRequest, call: Call[KeyHolder]) -> pb.Session:
        await self.quotas.check_request(call.caller.tenant)
        tenant = await self._tenant_of_session(call, request.session_id)
        return replies.session(await self.transcripts.get(request.session_id, tenant), self.names.model)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, call: Call[KeyHolder]) -> pb.DeleteSessionResponse:
        tenant = await self._tenant_of_session(call, request.session_id)
        # The deletion goes on if the caller leaves: the router returns the session's hops only once.
        await asyncio.shield(asyncio.ensure_future(self._delete(request.session_id, tenant)))
        return pb.DeleteSessionResponse()

    async def _delete(self, session_id: str, tenant: str) -> None:
        record = await self.transcripts.delete(session_id, tenant)
        identity = SessionIdentity.of_turn(record.session_id, record.epoch, tenant).at_end_of_turn()
        await self.sessions.free(identity, record.chain)

    async def stored_turn(self, session_id: str, number: int, call: Call[KeyHolder]) -> StoredTurn:
        """Reads a turn, which counts as a request. Raises ResourceNotFound if there is no such turn, QuotaExceeded."""
        await self.quotas.check_request(call.caller.tenant)
        return await self._stored_turn(session_id, number, call)

    async def continued_turn(self, session_id: str, number: int, call: Call[KeyHolder]) -> StoredTurn:
        """Reads a turn for an answer that follows at once and counts as the request for both; raises the same."""
        self.quotas.check_rate(call.caller.tenant)
        return await self._stored_turn(session_id, number, call)

    async def _stored_turn(self, session_id: str, number: int, call: Call[KeyHolder]) -> StoredTurn:
        tenant = await self._tenant_of_session(call, session_id)
        try:
            record = await self.transcripts.get(session_id, tenant)
        except SessionNotFound:
            raise _no_turn() from None
        found = next((each for each in record.turns if each.number == number), None)
        if found is None and (record.turns or record.num_turns != number):
            raise _no_turn()
        return record, found

    async def delete_turn(self, session_id: str, number: int, call: Call[KeyHolder]) -> None:
        """Forbids that a turn is read or continued, and deletes the session with its last turn.

        Raises ResourceNotFound, SessionBusy.
        """
        record, _ = await self.stored_turn(session_id, number, call)
        if len(record.turns) <= 1:
            await self.DeleteSession(pb.DeleteSessionRequest(session_id=session_id), call)
            return
        async with self.transcripts.turn(session_id, record.tenant) as turn:
            kept = [each for each in turn.record.turns if each.number != number]
            del turn.record.turns[:]
            turn.record.turns.extend(kept)
            await turn.commit()

    # --- the model ------------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call[KeyHolder]) -> pb.TokenizeResponse:
        tenant = self._tenant(call, Scope.TOKENIZE, self.names.adapter_of(request.model))
        if request.ByteSize() > MAX_TOKENIZED_BYTES:
            raise InvalidRequest("text", f"must have at most {MAX_TOKENIZED_BYTES} bytes; a longer one needs parts")
        encode: Callable[[], Sequence[int]]
        match request.WhichOneof("input"):
            case "text":
                add_special_tokens = not request.without_special_tokens
                encode = partial(self.tokenizer.encode, request.text, add_special_tokens=add_special_tokens)
            case "chat":
                conversation: Sequence[ChatMessage] = request.chat.messages
                conversations.check_messages(conversation)
                setting = conversations.setting(request.chat, self.chat.reserved_names)
                check_conversation(conversation, setting)
                _, conversation, setting = self._with_tools_shown((), conversation, setting)
                encode = partial(self.chat.prompt_ids, conversation, setting)
            case _:
                raise InvalidRequest("input", "one of text and chat must be set")
        await self.quotas.check_request(tenant)
        async with self.tokenizations.enter(tenant) as ticket:
            await ticket.admitted()
            return await asyncio.to_thread(self._tokenized, encode)

    def _tokenized(self, encode: Callable[[], Sequence[int]]) -> pb.TokenizeResponse:
        token_ids = encode()
        # A long text repeats its tokens, and decoding one costs more than the rest of its reply: each is decoded once.
        texts = {token_id: self.tokenizer.token_text(token_id) for token_id in set(token_ids)}
        response = pb.TokenizeResponse()
        for start in range(0, len(token_ids), _PIECE_TOKENS):  # other Python code runs between two pieces
            piece = token_ids[start : start + _PIECE_TOKENS]
            response.token_ids.extend(piece)
            response.tokens.extend(map(texts.__getitem__, piece))
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call[KeyHolder]) -> pb.DetokenizeResponse:
        tenant = self._tenant(call, Scope.TOKENIZE, self.names.adapter_of(request.model))
        if len(request.token_ids) > MAX_DETOKENIZED:
            raise InvalidRequest("token_ids", f"must be at most {MAX_DETOKENIZED}; more of them need parts")
        token_ids = requests.token_ids("token_ids", request.token_ids, self.model.vocab_size)
        await self.quotas.check_request(tenant)
        async with self.tokenizations.enter(tenant) as ticket:
            await ticket.admitted()
            text = await asyncio.to_thread(
                self.tokenizer.decode, token_ids, skip_special_tokens=request.without_special_tokens
            )
        return pb.DetokenizeResponse(text=text)

    def tokenizer_facts(self, call: Call[KeyHolder]) -> dict[str, Any]:
        """The names of the tokenizer's special tokens, its class and its chat template, as transformers has them."""
        self._tenant(call, Scope.TOKENIZE)
        return self.tokenizer.facts()

    async def ListModels(self, request: pb.ListModelsRequest, call: Call[KeyHolder]) -> pb.ListModelsResponse:
        model = self._described_model()
        adapters = self.names.listed(call.caller.tenant)
        aliases = (self.names.described(model, name=name) for name in self.names.listed_names[1:])
        described = (self.names.described(model, each) for each in adapters)
        return pb.ListModelsResponse(models=[model, *aliases, *described])

    async def GetModel(self, request: pb.GetModelRequest, call: Call[KeyHolder]) -> pb.Model:
        if not request.model:
            raise ModelNotFound("name a model")
        adapter = self.names.adapter_of(request.model)
        await self.names.resolve(adapter, call.caller.tenant)
        return self.names.described(self._described_model(), adapter)

    def _described_model(self) -> pb.Model:
        described = pb.Model(ready=self.placement.is_complete)
        described.MergeFrom(self.model)
        return described

    def _tenant(self, call: Call[KeyHolder], scope: Scope, adapter: str = "") -> str:
        call.caller.check(scope, *self.names.all_names, *self.names.with_adapter_each(adapter))
        return call.caller.tenant

    async def _tenant_of_session(self, call: Call[KeyHolder], session_id: str) -> str:
        """The tenant of a call that names only a session. A key for an adapter allows that adapter's sessions."""
        try:
            return self._tenant(call, Scope.SESSIONS)
        except ScopeDenied as denied:
            await self.quotas.check_request(call.caller.tenant)
            try:
                record = await self.transcripts.get(session_id, call.caller.tenant)
            except (SessionNotFound, InvalidRequest):
                raise denied from None
            return self._tenant(call, Scope.SESSIONS, record.adapter.name)

    def _reply_room(self, call: Call[KeyHolder], *, is_streamed: bool = False) -> ReplyRoom:
        """The room for a reply to gRPC."""
        metadata = call.context.invocation_metadata() or ()
        return ReplyRoom(PROTOBUF, stated_bytes(metadata, self.bounds.max_reply_bytes), is_streamed)

    def _caller(
        self,
        scope: Scope,
        message: AnyMessage | pb.ScoreRequest | pb.EmbedRequest,
        call: Call[KeyHolder],
        *,
        is_streamed: bool = False,
    ) -> tuple[Caller, str]:
        """The caller of a request, and the name of the requested adapter.

        Only names are read from the message before the key's scope is checked.

        Raises ModelNotFound, InvalidRequest, ScopeDenied.
        """
        limits = self.quotas.limits(call.caller.tenant)
        usage = pb.Usage()
        name = "" if isinstance(message, _WITHOUT_NAME) else message.request_id
        named = {"request_id": name} if REQUEST_ID.fullmatch(name) else {}
        call.describe(
            lambda: {
                "prompt_tokens": usage.prompt_tokens,
                "generated_tokens": usage.completion_tokens,
                "recoveries": usage.recoveries,
                **named,
            }
        )
        adapter = self.names.adapter_of(message.model, message.adapter)
        tenant = self._tenant(call, scope, adapter)
        seconds_left, until_s = call.context.time_remaining(), math.inf
        if seconds_left is not None:
            # The wait ends before the deadline, so that the error still reaches the caller.
            until_s = asyncio.get_running_loop().time() + max(0.0, seconds_left - self.bounds.farewell_s)
        trace = trace_parent(dict(call.context.invocation_metadata() or ())) if spans.is_collected() else None
        is_continuous = is_streamed and isinstance(message, AnyMessage) and message.continuous_usage
        caller = Caller(
            tenant, usage, until_s=until_s, trace=trace, is_streamed=is_streamed, has_continuous_usage=is_continuous,
            withholds_cached_tokens=limits.withhold_cached_tokens, answer_seconds=limits.answer_seconds,
            standby=limits.standby, note=call.note, name_ignored=call.name_ignored, expect_reply=call.held.expect_reply,
        )  # fmt: skip
        return caller, adapter


def _no_turn() -> ResourceNotFound:
    return ResourceNotFound("no response with this id is stored", field="response_id")


async def _collected(deltas: Answers, call: Call[KeyHolder]) -> list[tuple[int, Delta]]:
    """Waits until all answers have ended. Returns each with its index, in the order of the indexes.

    Raises Unauthenticated as soon as the caller's key or token is no longer valid.
    """
    answers: defaultdict[int, list[Delta]] = defaultdict(list)
    async with aclosing(deltas):
        async for index, delta in deltas:
            call.caller.check_again()
            answers[index].append(delta)
    return [(index, joined(parts)) for index, parts in sorted(answers.items())]
