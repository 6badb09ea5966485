"""GenerationService: authenticate, validate, answer."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from corolla.chassis.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from corolla.chassis.handlers import Context
from corolla.client.api import replies, validation
from corolla.client.api.tenants import Tenants
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.opener import ChainOpener
from corolla.client.chain.placement import PlacementWatch
from corolla.client.generation.admission import Admission
from corolla.client.generation.answer import Delta
from corolla.client.generation.answering import Answering
from corolla.client.generation.caller import Caller
from corolla.client.generation.usage import Usage
from corolla.client.text.chat import ChatTemplate, Message, check_roles
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.transcripts import Transcripts
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2

_FAREWELL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What GetModel tells."""

    name: str
    family: str
    num_blocks: int
    context_length: int
    vocab_size: int
    dtype: str
    fingerprint: str


class GenerationServicer:
    """Serves `GenerationService`."""

    def __init__(
        self,
        facts: ModelFacts,
        tenants: Tenants,
        answering: Answering,
        tokenizations: Admission,
        transcripts: Transcripts,
        opener: ChainOpener,
        placement: PlacementWatch,
        tokenizer: TextTokenizer,
        chat: ChatTemplate,
    ) -> None:
        self._facts = facts
        self._tenants = tenants
        self._answering = answering
        self._tokenizations = tokenizations
        self._transcripts = transcripts
        self._opener = opener
        self._placement = placement
        self._tokenizer = tokenizer
        self._chat = chat

    # --- text ---------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        usage = Usage()
        completions: dict[int, replies.Collected] = {}
        async with aclosing(self._generate(request, context, usage)) as deltas:
            async for index, delta in deltas:
                completions.setdefault(index, replies.Collected()).add(delta)
        return pb.GenerateResponse(
            model=self._facts.name,
            completions=[
                pb.Completion(
                    index=index,
                    text=collected.text,
                    token_ids=[token.token_id for token in collected.tokens],
                    finish_reason=collected.finish_reason,
                    logprobs=replies.logprobs(self._tokenizer, collected.tokens),
                )
                for index, collected in sorted(completions.items())
            ],
            usage=replies.usage(usage),
        )

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        usage = Usage()
        num_open = max(1, request.num_completions)
        async with aclosing(self._generate(request, context, usage)) as deltas:
            async for index, delta in deltas:
                num_open -= delta.finish_reason is not None
                yield pb.GenerateChunk(
                    index=index,
                    token_ids=[delta.token.token_id],
                    text_delta=delta.text,
                    logprobs=replies.logprobs(self._tokenizer, [delta.token]),
                    finish_reason=replies.finish_reason(delta.finish_reason),
                    usage=None if num_open else replies.usage(usage),
                )

    async def _generate(
        self, request: pb.GenerateRequest, context: Context, usage: Usage
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        tenant = self._tenants.of(context)
        validation.check_model(request.model, self._facts.name)
        call = validation.prompt_call(request, self._facts.vocab_size, self._facts.context_length)
        caller = Caller(tenant, request.ByteSize(), usage, _until_s(context))
        if not call.session_id:
            encode = partial(self._prompt_ids, call.prompt, add_special_tokens=True)
            answers = self._answering.complete(caller, encode, call.options, call.num_completions)
            async with aclosing(answers) as deltas:
                async for pair in deltas:
                    yield pair
            return

        def next_prompt(record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
            if record.transcript:
                raise InvalidRequest("session_id", "this session holds a conversation; continue it with Chat")
            is_first = not record.token_log
            return len(record.token_log), [
                *record.token_log,
                *self._prompt_ids(call.prompt, add_special_tokens=is_first),
            ]

        turn = self._answering.continue_session(
            caller, call.session_id, next_prompt, lambda record, text: None, call.options
        )
        async with aclosing(turn) as turn_deltas:
            async for delta in turn_deltas:
                yield 0, delta

    def _prompt_ids(self, prompt: str | Sequence[int], *, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        token_ids = self._tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens, max_tokens=self._facts.context_length
        )
        if not token_ids:
            raise InvalidRequest("text", "must give at least one token")
        return token_ids

    # --- conversations --------------------------------------------------------------------------------------------

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        usage, collected = Usage(), replies.Collected()
        async with aclosing(self._answer(request, context, usage)) as deltas:
            async for delta in deltas:
                collected.add(delta)
        return pb.ChatResponse(
            model=self._facts.name,
            message=pb.ChatMessage(role="assistant", content=collected.text),
            token_ids=[token.token_id for token in collected.tokens],
            finish_reason=collected.finish_reason,
            logprobs=replies.logprobs(self._tokenizer, collected.tokens),
            usage=replies.usage(usage),
        )

    async def ChatStream(self, request: pb.ChatRequest, context: Context) -> AsyncGenerator[pb.ChatChunk, None]:
        usage = Usage()
        async with aclosing(self._answer(request, context, usage)) as deltas:
            async for delta in deltas:
                yield pb.ChatChunk(
                    token_ids=[delta.token.token_id],
                    text_delta=delta.text,
                    logprobs=replies.logprobs(self._tokenizer, [delta.token]),
                    finish_reason=replies.finish_reason(delta.finish_reason),
                    usage=None if delta.finish_reason is None else replies.usage(usage),
                )

    async def _answer(self, request: pb.ChatRequest, context: Context, usage: Usage) -> AsyncGenerator[Delta, None]:
        tenant = self._tenants.of(context)
        validation.check_model(request.model, self._facts.name)
        call = validation.chat_call(request, self._facts.vocab_size)
        caller = Caller(tenant, request.ByteSize(), usage, _until_s(context))
        max_tokens = self._facts.context_length
        if not call.session_id:
            check_roles(call.messages)
            encode = partial(self._chat.prompt_ids, call.messages, max_tokens=max_tokens)
            answers = self._answering.complete(caller, encode, call.options, 1)
            async with aclosing(answers) as deltas:
                async for _, delta in deltas:
                    yield delta
            return

        def next_prompt(record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
            if record.token_log and not record.transcript:
                raise InvalidRequest("session_id", "this session holds plain text; continue it with Generate")
            earlier = [Message(message.role, message.content) for message in record.transcript]
            validation.check_new_messages(earlier, call.messages)
            return self._chat.next_turn_ids(record.token_log, earlier, call.messages, max_tokens=max_tokens)

        def remember(record: router_pb2.SessionRecord, text: str) -> None:
            for message in (*call.messages, Message("assistant", text)):
                record.transcript.add(role=message.role, content=message.content)

        turn = self._answering.continue_session(caller, call.session_id, next_prompt, remember, call.options)
        async with aclosing(turn) as turn_deltas:
            async for delta in turn_deltas:
                yield delta

    # --- sessions -------------------------------------------------------------------------------------------------

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.Session:
        tenant = self._tenants.of(context)
        validation.check_model(request.model, self._facts.name)
        return replies.session(await self._transcripts.create(tenant))

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.Session:
        return replies.session(await self._transcripts.get(request.session_id, self._tenants.of(context)))

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        # Goes on though the caller leaves: what the router answers, and only once, tells where its pages are.
        await asyncio.shield(asyncio.ensure_future(self._delete(request.session_id, self._tenants.of(context))))
        return pb.DeleteSessionResponse()

    async def _delete(self, session_id: str, tenant: str) -> None:
        record = await self._transcripts.delete(session_id, tenant)
        identity = SessionIdentity.of_turn(record.session_id, record.epoch, tenant).at_end_of_turn()
        await self._opener.forget(identity, record.chain)

    # --- the model ------------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        tenant = self._tenants.of(context)
        validation.check_model(request.model, self._facts.name)
        encode: Callable[[], Sequence[int]]
        max_tokens = self._facts.context_length
        match request.WhichOneof("input"):
            case "text":
                add_special_tokens = not request.without_special_tokens
                encode = partial(
                    self._tokenizer.encode, request.text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
                )
            case "chat":
                conversation = validation.messages(request.chat.messages)
                check_roles(conversation)
                encode = partial(self._chat.prompt_ids, conversation, max_tokens=max_tokens)
            case _:
                raise InvalidRequest("input", "one of text and chat must be set")
        async with self._tokenizations.request(tenant, request.ByteSize(), Usage()) as meter, meter.running():
            return await asyncio.to_thread(self._tokenized, encode)

    def _tokenized(self, encode: Callable[[], Sequence[int]]) -> pb.TokenizeResponse:
        token_ids, max_tokens = encode(), self._facts.context_length
        if len(token_ids) > max_tokens:
            raise ContextLengthExceeded("prompt", f"exceeds the model's context of {max_tokens} tokens")
        return pb.TokenizeResponse(token_ids=token_ids, tokens=map(self._tokenizer.token_text, token_ids))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        self._tenants.of(context)
        return pb.ListModelsResponse(models=[self._model()])

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.Model:
        self._tenants.of(context)
        if not request.model:
            raise ModelNotFound("name a model; see ListModels")
        validation.check_model(request.model, self._facts.name)
        return self._model()

    def _model(self) -> pb.Model:
        facts = self._facts
        return pb.Model(
            name=facts.name,
            family=facts.family,
            num_blocks=facts.num_blocks,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            dtype=facts.dtype,
            fingerprint=facts.fingerprint,
            has_chat_template=self._chat.exists,
            ready=self._placement.cheapest_chain is not None,
        )


def _until_s(context: Context) -> float:
    """When a caller no longer waits, less the moment in which it can still be told why."""
    seconds_left = context.time_remaining()
    if seconds_left is None:
        return math.inf
    return asyncio.get_running_loop().time() + max(0.0, seconds_left - _FAREWELL_S)
