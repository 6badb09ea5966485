"""Makes answers to checked requests: opens a chain for each answer, reads the tokens from it, and gives it back.

Context managers hold all resources of an answer, so that finish, cancellation and failure free them in the same way.
"""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from corolla.chain.identity import SessionIdentity
from corolla.chain.prompt_readout import PromptReadout
from corolla.chain.recovery_budget import RecoveryReport
from corolla.chain.reservations import OpenOptions
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chassis.errors import (
    CorollaError,
    InvalidRequest,
    QuotaExceeded,
    RouterUnavailable,
    StoreUnavailable,
    context_exceeded,
)
from corolla.chassis.merge import merge
from corolla.client.adapters import ModelNames
from corolla.client.generation.admission import Admission, AdmissionTicket, RequestMeter
from corolla.client.generation.answer import Answer, Delta, joined
from corolla.client.generation.last_answer import read_last_answer, write_last_answer
from corolla.client.generation.loop import AnswerReader, Prefill, SharedPrompt, generate
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.request_trace import RequestTraces
from corolla.client.generation.resumption import UnsentDeltas, replay_answer
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import Allowance, QuotaEnforcer
from corolla.client.reply_sizes import NO_WIDTHS, TokenWidths
from corolla.client.text.conversation import Message
from corolla.client.text.grammar_process import GrammarProcess
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.transcripts import Transcripts
from corolla.decoding.parameters import SpeculationMode, SpeculationOptions
from corolla.decoding.sampler_record import SamplerRecord
from corolla.decoding.stopping import FinishReason, StopDecider
from corolla.v1 import blocks_pb2, common_pb2, router_pb2
from corolla.wire.adapter_version import AdapterVersion

NextPrompt = Callable[[router_pb2.SessionRecord], tuple[int, Sequence[int]]]
"""Takes a session's record, which is empty for a request without a session. Returns how many first tokens the new token
log shares with the old one, and the new log."""

RecordTurn = Callable[[router_pb2.SessionRecord, Message], None]
"""Writes a finished turn's answer into the record."""

Result = TypeVar("Result")

_NUM_THREADS: Final = 4
GROWTH_PATIENCE_S: Final = 30.0
_GROWTH_INTERVAL_S: Final = 0.5
_DRAFT_SOURCES: Final = {
    SpeculationMode.PROMPT_LOOKUP: blocks_pb2.Drafts.SOURCE_PROMPT_LOOKUP,
    SpeculationMode.DRAFT_MODEL: blocks_pb2.Drafts.SOURCE_DRAFT_MODEL,
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The model's limits for answers.

    `vocab_size`: the number of tokens that the model knows; its tokenizer may have more.
    `default_max_tokens`: the most tokens of an answer whose request sets no number; None: the rest of the context.
    `may_speculate`: whether hops can remove wrong draft tokens.
    `growth_tokens`: the tokens for which an answer without a limit reserves pages at first, and the fewest that it asks
    for later: with pages for the rest of its context, it would refuse others, and most answers are short.
    """

    context_length: int
    vocab_size: int
    default_max_tokens: int | None
    eos_token_ids: frozenset[int]
    may_speculate: bool = True
    growth_tokens: int = 256


@dataclass(frozen=True, slots=True)
class SpeculationDefaults:
    """The defaults of speculation: the mode, and the most tokens to draft for one step.

    `is_adaptive`: whether the number of draft tokens depends on their success and cost.
    """

    mode: SpeculationMode = SpeculationMode.OFF
    max_draft_tokens: int = 16
    is_adaptive: bool = True


@dataclass(frozen=True, slots=True)
class _Completion:
    """The data that the answers to one prompt share. The caller waits until `until_s` of the event loop's clock."""

    request: AnyRequest
    prompt_ids: Sequence[int]
    max_tokens: int
    room: "_Room"
    meter: RequestMeter
    until_s: float
    adapter: AdapterVersion | None
    shared: SharedPrompt
    readout: PromptReadout | None

    def shared_ids(self, text_ids: Sequence[int]) -> Sequence[int]:
        """The beginning of a text that hops may have cached: a readout needs the rest to be computed."""
        return text_ids if self.readout is None else self.readout.shared_ids

    def with_readout(self, delta: Delta, is_sent: bool) -> Delta:
        """The delta, with the readout of the prompt if that is complete and not sent yet."""
        if is_sent or self.readout is None or not self.readout.is_complete:
            return delta
        return replace(delta, readout=self.readout)


class _Room:
    """The tokens for which the answers to one request have reserved pages, and quota of their tenant.

    Args:
        first_tokens: for how many tokens each answer's session has room at first, prompt included.
        growth_tokens: the fewest further tokens that an answer asks for.
    """

    def __init__(
        self, allowance: Allowance, num_prompt_tokens: int, first_tokens: int, growth_tokens: int, num_answers: int
    ) -> None:
        self._allowance = allowance
        self._growth_tokens = growth_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self.first_tokens = first_tokens
        self._sizes = [first_tokens] * num_answers

    @property
    def num_tokens(self) -> int:
        """How many tokens count for the quota: those of the prompt once, and those of all answers."""
        return self._num_prompt_tokens + sum(size - self._num_prompt_tokens for size in self._sizes)

    async def grow(self, index: int, session: ChainSession) -> bool:
        """Doubles the room for an answer, or adds to it what quota and pages allow; waits a while for pages.

        Returns False if there is no more room.
        """
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + GROWTH_PATIENCE_S
        held = session.num_reserved_tokens
        while True:
            wanted = session.growth_sizes(self._num_prompt_tokens, self._growth_tokens)
            sizes = await self._sizes_within_quota(index, wanted)
            if not sizes:
                return False
            try:
                await session.grow(sizes)
            finally:
                self._sizes[index] = session.num_reserved_tokens
            if session.num_reserved_tokens != sizes[0]:
                await self._allowance.take_reserved(self.num_tokens)
            if session.num_reserved_tokens > held:
                return True
            if clock() >= give_up_s:
                return False
            await asyncio.sleep(random.uniform(0.5, 1.5) * _GROWTH_INTERVAL_S)

    async def _sizes_within_quota(self, index: int, sizes: Sequence[int]) -> Sequence[int]:
        """The sizes that the quota allows, which come with the largest one first; takes the quota for that one."""
        held = self._sizes[index]
        for number, size in enumerate(sizes):
            self._sizes[index] = size
            try:
                await self._allowance.take_reserved(self.num_tokens)
            except QuotaExceeded:
                self._sizes[index] = held
                continue
            return sizes[number:]
        return ()


class Answering:
    """Answers requests, as turns of their sessions or without a session."""

    def __init__(
        self,
        sessions: ChainSessions,
        transcripts: Transcripts,
        tokenizer: TextTokenizer,
        limits: ModelLimits,
        quotas: QuotaEnforcer,
        admission: Admission,
        speculation: SpeculationDefaults,
        metrics: ClientMetrics,
        grammars: GrammarProcess,
        names: ModelNames,
        traces: RequestTraces | None = None,
        widths: TokenWidths = NO_WIDTHS,
    ) -> None:
        self._widths = widths
        self._grammars = grammars
        self._names = names
        # Prompts are tokenised in threads of their own: long ones must not delay other work in threads, such as reading
        # keys.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompts")
        self._sessions = sessions
        self._transcripts = transcripts
        self._tokenizer = tokenizer
        self._limits = limits
        self._quotas = quotas
        self._admission = admission
        self._speculation = speculation
        self._metrics = metrics
        self._traces = traces or RequestTraces()

    def answer(
        self, request: AnyRequest, next_prompt: NextPrompt, record_turn: RecordTurn
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Answers a prompt: as the next turn of the request's session, or without a session, once or several times.

        Args:
            next_prompt: makes the prompt; it is called before the request's turn comes, so that a wrong prompt fails at
                once.

        Yields:
            Pairs `(index, delta)` as they come; the last delta of each index has a finish reason.
        """
        if request.session_id:
            return self._continue_session(request, next_prompt, record_turn)
        return self._complete(request, next_prompt)

    async def _complete(self, request: AnyRequest, next_prompt: NextPrompt) -> AsyncGenerator[tuple[int, Delta], None]:
        """Gives each answer a session of its own. The first session processes the prompt, and the others fork it."""
        until_s = request.caller.waits_until_s(request.time_limit_s)
        num_completions = request.num_completions
        async with AsyncExitStack() as stack:
            allowance, ticket, meter, request = await stack.enter_async_context(self._entered(request))
            adapter = await self._names.resolve(request.adapter, request.caller.tenant)
            _, prompt_ids = await self._in_thread(self._known_prompt, next_prompt, router_pb2.SessionRecord())
            max_tokens = self._max_tokens(len(prompt_ids), request)
            shared = SharedPrompt(num_completions - 1)
            readout = None if request.readout is None else request.readout(prompt_ids)
            room = self._room(allowance, len(prompt_ids), max_tokens, request)
            job = _Completion(request, prompt_ids, max_tokens, room, meter, until_s, adapter, shared, readout)
            if readout is not None and request.is_reading:
                await allowance.take_prompt(len(prompt_ids), len(prompt_ids))
                await ticket.admitted()
                await self._read_out(job, readout)
                for index in range(num_completions):
                    yield index, Delta((), "", FinishReason.LENGTH, readout=None if index else readout)
                return
            begun = await self._begun_answer(prompt_ids, job.max_tokens, request)
            if begun.finish_reason is not None:
                # The caller has all tokens already, but not the finish reason.
                meter.count_prompt(len(prompt_ids), len(prompt_ids), 0)
                meter.count_finish(begun.finish_reason)
                yield 0, Delta((), "", begun.finish_reason, stop_sequence=begun.stop_sequence)
                return
            await allowance.take_prompt(len(prompt_ids), job.room.num_tokens)
            await ticket.admitted()
            if num_completions == 1:
                unsent = UnsentDeltas(request.resumption)
                only = self._stream_completion(job, 0)
                is_read = False
                async for deltas in await stack.enter_async_context(aclosing(only)):
                    meter.count_tokens(0, sum(len(each.tokens) for each in deltas))
                    if (left := unsent.select(deltas)) is not None:
                        meter.count_finish(left.finish_reason)
                        yield 0, job.with_readout(left, is_read)
                        is_read = True
                return
            streams = [self._stream_completion(job, index) for index in range(num_completions)]
            is_read = False
            async for index, deltas in await stack.enter_async_context(aclosing(merge(streams))):
                meter.count_tokens(index, sum(len(each.tokens) for each in deltas))
                delta = job.with_readout(joined(deltas), is_read)
                is_read = is_read or delta.readout is not None
                meter.count_finish(delta.finish_reason)
                yield index, delta

    async def _read_out(self, job: _Completion, readout: PromptReadout) -> None:
        """Processes a prompt without an answer."""
        sampler = self._sampler(job.request, job.prompt_ids, 1, router_pb2.SessionRecord())
        async with self._open(job, None, readout.shared_ids, sampler, None) as session:
            await session.restore(job.prompt_ids)
            job.meter.count_prompt(len(job.prompt_ids), session.position, 0)
            await session.read_out(job.prompt_ids[session.position :], readout)

    async def _continue_session(
        self, request: AnyRequest, next_prompt: NextPrompt, record_turn: RecordTurn
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Runs one turn of the request's session. A turn that does not finish leaves the session unchanged.

        A turn with a name runs only once: a second request with this name gets the recorded answer.
        """
        session_id, tenant, turn_name = request.session_id, request.caller.tenant, request.turn_name
        until_s = request.caller.waits_until_s(request.time_limit_s)
        async with AsyncExitStack() as stack:
            allowance, ticket, meter, request = await stack.enter_async_context(self._entered(request))
            if ticket.is_waiting:
                await self._check_turn(request, next_prompt)
            await ticket.admitted()
            with self._quotas.counted_refusals():
                turn = await stack.enter_async_context(
                    self._transcripts.turn(
                        session_id, tenant, turn_name, allowance.limits.stored_session_bytes, request.num_bytes
                    )
                )
            record = turn.record
            if turn_name and record.last_turn == turn_name:
                for delta in request.resumption.unsent_of(await self._last_answer(record, request, meter)):
                    yield 0, delta
                return
            earlier = common_pb2.Chain.FromString(record.chain.SerializeToString())
            num_kept_tokens, prompt_ids, max_tokens = await self._prompt_of_turn(record, next_prompt, request)
            room = self._room(allowance, len(prompt_ids), max_tokens, request)
            await allowance.take_prompt(len(prompt_ids), room.num_tokens)
            answer, request = await self._answer_of_turn(prompt_ids, max_tokens, request)
            sampler = self._sampler(request, prompt_ids, max_tokens, record)
            text_ids = [*prompt_ids, *answer.token_ids]
            identity = SessionIdentity.of_turn(session_id, record.epoch, tenant)
            position = num_past_tokens = min(num_kept_tokens, record.position)
            open_options = OpenOptions(
                max_tokens=room.first_tokens,
                most_tokens=len(prompt_ids) + max_tokens,
                transient=False,
                lease_ms=self._transcripts.ttl_ms,
                recorded_chain=earlier,
                record_id=session_id,
                texts=[text_ids],
                cache_salt=request.cache_salt,
                adapter=await self._names.of_session(record, request.adapter, tenant),
                max_position=num_past_tokens if earlier.hops else None,
            )
            async with self._sessions.open(
                identity, open_options, sampler, partial(_count_recovery, meter, answer), until_s
            ) as session:
                try:
                    _check_drafts(session, request)
                    await session.restore(text_ids, num_past_tokens if earlier.hops else 0)
                    num_lost_tokens = max(0, num_past_tokens - session.position)
                    meter.count_prompt(
                        len(prompt_ids), min(session.num_cached_tokens, len(prompt_ids)), num_lost_tokens
                    )
                    prefill = partial(session.prefill, text_ids[session.position :])
                    unsent = UnsentDeltas(request.resumption)
                    async with aclosing(self._deltas(session, answer, prefill, room, meter)) as all_deltas:
                        async for deltas in all_deltas:
                            meter.count_tokens(0, sum(len(each.tokens) for each in deltas))
                            left = unsent.select(deltas)
                            if deltas[-1].finish_reason is not None:
                                # The record is written before the end is sent: the next turn may follow at once.
                                _write_back(record, session, prompt_ids, answer, sampler, request, record_turn)
                                await turn.commit()
                                position = session.position
                            if left is not None:
                                meter.count_finish(left.finish_reason)
                                yield 0, left
                finally:
                    recorded = record.chain if turn.committed else earlier
                    session.park(position, earlier=earlier, recorded=recorded)

    @asynccontextmanager
    async def _entered(
        self, request: AnyRequest
    ) -> AsyncIterator[tuple[Allowance, AdmissionTicket, RequestMeter, AnyRequest]]:
        """Holds a request's quotas and its place in the line until its end. Yields the request with its grammar.

        Raises QuotaExceeded, QueueFull, or InvalidRequest.
        """
        caller, num_sequences = request.caller, request.num_completions
        with self._traces.request(request):
            async with (
                self._quotas.running(
                    caller.tenant, num_sequences, caller.usage, is_streamed=caller.is_streamed
                ) as allowance,
                self._admission.enter(caller.tenant, num_sequences) as ticket,
            ):
                request = replace(request, grammar=await self._checked_grammar(request))
                with RequestMeter(self._metrics, caller.usage, 0 if request.is_reading else num_sequences) as meter:
                    yield allowance, ticket, meter, request

    async def _in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _known_prompt(self, next_prompt: NextPrompt, record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
        """What `next_prompt` makes. Raises InvalidRequest if the text has a token that the model does not know."""
        num_kept_tokens, prompt_ids = next_prompt(record)
        if (largest := max(prompt_ids, default=0)) >= self._limits.vocab_size:
            raise InvalidRequest("prompt", f"has the token {largest}; the model knows {self._limits.vocab_size} tokens")
        return num_kept_tokens, prompt_ids

    async def _checked_grammar(self, request: AnyRequest) -> str:
        """The grammar of the request's form; empty without one. The caller learns what it does not follow.

        Raises InvalidRequest for a form that no answer can have, or that the received tokens do not fit.
        """
        if request.form is None:
            return ""
        admitted = await self._grammars.admit(request.caller.tenant, request.form, request.resumption.received_ids)
        request.caller.name_ignored(admitted.ignored)
        return admitted.grammar

    async def _check_turn(self, request: AnyRequest, next_prompt: NextPrompt) -> None:
        """Checks a turn before it waits: a text that is too long now stays too long, since sessions only grow."""
        try:
            record = await self._transcripts.get(request.session_id, request.caller.tenant)
        except (RouterUnavailable, StoreUnavailable):
            return  # the router may be back when the turn begins
        if not request.turn_name or record.last_turn != request.turn_name:
            await self._prompt_of_turn(record, next_prompt, request)

    async def _prompt_of_turn(
        self, record: router_pb2.SessionRecord, next_prompt: NextPrompt, request: AnyRequest
    ) -> tuple[int, Sequence[int], int]:
        """Returns how many first tokens the new token log shares with the old one, the new log, and the token limit."""
        await self._names.of_session(record, request.adapter, record.tenant)
        num_kept_tokens, prompt_ids = await self._in_thread(self._known_prompt, next_prompt, record)
        return num_kept_tokens, prompt_ids, self._max_tokens(len(prompt_ids), request)

    async def _stream_completion(self, job: _Completion, index: int) -> AsyncGenerator[Sequence[Delta], None]:
        """Generates one of the answers to a prompt, in a session that ends with the answer."""
        answer = await self._begun_answer(job.prompt_ids, job.max_tokens, job.request)
        sampler = self._sampler(job.request, job.prompt_ids, job.max_tokens, router_pb2.SessionRecord(), index)
        text_ids = [*job.prompt_ids, *answer.token_ids]
        async with AsyncExitStack() as stack:
            prefill: Prefill
            if index == 0:
                session = await stack.enter_async_context(
                    self._open(job, answer, job.shared_ids(text_ids), sampler, None)
                )
                _check_drafts(session, job.request)
                await session.restore(text_ids)
                job.meter.count_prompt(len(job.prompt_ids), min(session.position, len(job.prompt_ids)), 0)
                job.shared.source.set_result(session)
                prefill = partial(job.shared.prefill, session, text_ids[session.position :], job.readout)
            else:
                source = await job.shared.source
                try:
                    session = await stack.enter_async_context(self._open(job, answer, text_ids, sampler, source.chain))
                    prefill = partial(job.shared.fork, session, text_ids)
                except CorollaError:
                    # The first answer's chain has no room; another chain may have some.
                    job.shared.release()
                    session = await stack.enter_async_context(self._open(job, answer, text_ids, sampler, None))
                    await session.restore(text_ids)
                    prefill = partial(session.prefill, text_ids[session.position :])
            all_deltas = self._deltas(session, answer, prefill, job.room, job.meter, index)
            async for deltas in await stack.enter_async_context(aclosing(all_deltas)):
                yield deltas

    @asynccontextmanager
    async def _open(
        self,
        job: _Completion,
        answer: Answer | None,
        shared_ids: Sequence[int],
        sampler: SamplerRecord,
        chain: common_pb2.Chain | None,
    ) -> AsyncIterator[ChainSession]:
        """Opens a session until the context ends: on `chain` only or, without one, on the best chain.

        Hops may have cached a beginning of `shared_ids`, without the last of these tokens.
        """
        identity = SessionIdentity(secrets.token_bytes(16), 1, job.request.caller.tenant)
        open_options = OpenOptions(
            max_tokens=job.room.first_tokens,
            most_tokens=len(job.prompt_ids) + job.max_tokens,
            transient=True,
            texts=[shared_ids],
            cache_salt=job.request.cache_salt,
            adapter=job.adapter,
            only_chain=chain,
        )
        count_recovery = partial(_count_recovery, job.meter, answer)
        async with self._sessions.open(identity, open_options, sampler, count_recovery, job.until_s) as session:
            try:
                yield session
            finally:
                session.close()

    def _deltas(
        self,
        session: ChainSession,
        answer: Answer,
        prefill: Prefill,
        room: "_Room",
        meter: RequestMeter,
        index: int = 0,
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """Generates an answer's deltas, including those that its caller has already."""
        if session.mixes_numerics:
            meter.count_doubt(0)
        reader = AnswerReader(answer, meter.started_s)
        return generate(session, answer, reader, prefill, partial(room.grow, index), meter.count_drafts)

    def _room(self, allowance: Allowance, num_prompt_tokens: int, max_tokens: int, request: AnyRequest) -> "_Room":
        first, growth_tokens = max_tokens, self._limits.growth_tokens
        if request.max_tokens is None:
            first = min(max_tokens, len(request.resumption.received_ids) + growth_tokens)
        return _Room(allowance, num_prompt_tokens, num_prompt_tokens + first, growth_tokens, request.num_completions)

    def _max_tokens(self, num_prompt_tokens: int, request: AnyRequest) -> int:
        """The most new tokens: as many as the request asks for, or as the context has room for.

        Raises ContextLengthExceeded if the prompt leaves no room for an answer, ReplyTooLarge, and QueueFull
        if the service has no room for the prompt in the reply.
        """
        room = self._limits.context_length - num_prompt_tokens
        num_echoed = request.num_echoed(num_prompt_tokens)
        of_reply = self._widths, request.num_completions, request.reply_logprobs, num_echoed
        most = request.reply.most_tokens(*of_reply)
        wanted = self._limits.default_max_tokens if request.max_tokens is None else request.max_tokens
        if room < (0 if wanted == 0 else 1):
            raise context_exceeded(self._limits.context_length, num_prompt_tokens)
        if request.max_tokens is not None:
            request.reply.check_tokens(min(request.max_tokens, room), *of_reply)
        elif most is not None and (room := min(room, most)) < 1:
            request.reply.check_tokens(1, *of_reply)
        request.caller.expect_reply(request.reply.echo_bytes(*of_reply))
        return room if wanted is None else min(wanted, room)

    def _sampler(
        self,
        request: AnyRequest,
        prompt_ids: Sequence[int],
        max_tokens: int,
        record: router_pb2.SessionRecord,
        index: int = 0,
    ) -> SamplerRecord:
        """The sampler record of an answer. A seed begins a random stream; without one, the session's stream goes on.

        Tokens that the caller has already were drawn from the same stream. Several answers have different seeds.
        """
        params, received_ids = request.sampling, request.resumption.received_ids
        state, num_draws = record.sampler_state, record.num_draws_since_state
        if params.seed is not None:
            state, num_draws = b"", 0
            params = replace(params, seed=params.seed + index)
        params = request.resumption.seeded(params, request.caller.tenant)
        return SamplerRecord(
            params,
            secrets.randbits(64) if params.seed is None else params.seed,
            prompt_ids,
            generated_ids=received_ids,
            state=state,
            num_draws=num_draws if params.is_greedy else num_draws + len(received_ids),
            max_new_tokens=max_tokens,
            end_token_ids=() if request.ignore_eos else self._limits.eos_token_ids,
            drafts=self._drafts(request.speculation),
            grammar=request.grammar,
        )

    def _drafts(self, speculation: SpeculationOptions) -> blocks_pb2.Drafts | None:
        defaults = self._speculation
        if not self._limits.may_speculate:
            if speculation.mode in _DRAFT_SOURCES:
                raise InvalidRequest(
                    "speculation.mode",
                    "is not possible with this model: draft tokens cannot be removed from its recurrent state",
                )
            return None
        source = _DRAFT_SOURCES.get(speculation.mode or defaults.mode)
        if source is None:
            return None
        return blocks_pb2.Drafts(
            source=source,
            max_tokens=min(speculation.max_draft_tokens or defaults.max_draft_tokens, defaults.max_draft_tokens),
            is_adaptive=defaults.is_adaptive,
        )

    async def _begun_answer(self, prompt_ids: Sequence[int], max_tokens: int, request: AnyRequest) -> Answer:
        """An answer that holds the tokens that its caller has already."""
        decider = StopDecider(
            max_new_tokens=max_tokens,
            eos_token_ids=self._limits.eos_token_ids,
            ignore_eos=request.ignore_eos,
            time_limit_s=request.time_limit_s,
        )
        answer = self._new_answer(prompt_ids, decider, request)
        if request.resumption.received_ids:
            # A thread decodes these tokens, since all answers share the event loop.
            await self._in_thread(request.resumption.replay_into, answer)
        return answer

    def _new_answer(self, prompt_ids: Sequence[int], decider: StopDecider, request: AnyRequest) -> Answer:
        output_parsing = request.output_parsing
        if output_parsing is None:
            return Answer(self._tokenizer, prompt_ids, decider, request.stop_sequences)
        parser = output_parsing.parser(self._tokenizer, prompt_ids, request.turn_name)
        shown_ids = output_parsing.shown_ids(self._limits.eos_token_ids)
        return Answer(self._tokenizer, prompt_ids, decider, request.stop_sequences, parser, shown_ids)

    async def _answer_of_turn(
        self, prompt_ids: Sequence[int], max_tokens: int, request: AnyRequest
    ) -> tuple[Answer, AnyRequest]:
        """The answer of a turn, and its request.

        If the caller has all tokens already, the request drops the last one: the hops generate it again, and the turn
        ends.
        """
        answer = await self._begun_answer(prompt_ids, max_tokens, request)
        if answer.finish_reason is None:
            return answer, request
        request = replace(request, resumption=request.resumption.without_last())
        return await self._begun_answer(prompt_ids, max_tokens, request), request

    async def _last_answer(
        self, record: router_pb2.SessionRecord, request: AnyRequest, meter: RequestMeter
    ) -> list[Delta]:
        """The deltas of the session's last answer, made from its record without computing."""
        reason = FinishReason(record.last_finish_reason)
        prompt_ids, tokens = read_last_answer(record)
        usage = request.caller.usage
        usage.prompt_tokens = usage.cached_tokens = len(prompt_ids)
        unbounded = StopDecider(max_new_tokens=len(record.token_log), ignore_eos=True)
        answer = self._new_answer(prompt_ids, unbounded, request)
        deltas = await self._in_thread(replay_answer, answer, tokens, reason)
        meter.count_finish(reason)
        return deltas


def _count_recovery(meter: RequestMeter, answer: Answer | None, report: RecoveryReport) -> None:
    """Counts a recovery in mid-answer; without an answer, the prompt is read for its log probabilities only."""
    meter.count_recovery(report)
    if report.mixes_numerics:
        meter.count_doubt(len(answer.tokens) if answer is not None else 0)


def _check_drafts(session: ChainSession, request: AnyRequest) -> None:
    """Raises InvalidRequest if the chain lacks the wanted draft model. A resumed answer goes on without one."""
    may_lack_one = session.has_draft_model or request.resumption.num_received > 0
    if request.speculation.mode is SpeculationMode.DRAFT_MODEL and not may_lack_one:
        raise InvalidRequest(
            "speculation.mode", "is not possible, since the block servers have no draft model; use prompt lookup"
        )


def _write_back(
    record: router_pb2.SessionRecord,
    session: ChainSession,
    prompt_ids: Sequence[int],
    answer: Answer,
    sampler: SamplerRecord,
    request: AnyRequest,
    record_turn: RecordTurn,
) -> None:
    record_turn(record, answer.message)
    record.chain.CopyFrom(session.chain_to_record)
    record.position = session.position
    record.token_log[:] = [*prompt_ids, *answer.token_ids]
    record.sampler_state, record.num_draws_since_state = sampler.state, sampler.num_draws
    write_last_answer(record, answer, request.turn_name)
    record.num_turns += 1
    record.turns.add(
        number=record.num_turns,
        num_messages=len(record.transcript),
        finish_reason=record.last_finish_reason,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(answer.tokens),
        ended_s=int(time.time()),
        note=request.caller.note,
    )
