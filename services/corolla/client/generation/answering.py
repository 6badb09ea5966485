"""Answers checked requests: as turns of their sessions, or without a session, once or several times.

Context managers hold all resources of an answer, so that finish, cancellation and failure free them in the same way.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from corolla.chain.identity import SessionIdentity
from corolla.chain.prompt_readout import PromptReadout
from corolla.chain.reservations import OpenOptions
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chassis.errors import CorollaError, RouterUnavailable, StoreUnavailable
from corolla.chassis.merge import merge
from corolla.client.adapters import ModelNames
from corolla.client.generation.answer import Answer
from corolla.client.generation.answer_factory import AnswerFactory, AnswerRoom, NextPrompt
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.resumption import UnsentDeltas, write_last_answer
from corolla.client.generation.running_request import Entrance, RunningRequest, next_deltas
from corolla.client.output_parsing.deltas import Delta
from corolla.client.transcripts import Transcripts, Turn
from corolla.decoding.stopping import FinishReason
from corolla.v1 import common_pb2, router_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.page_hashes import TextDigests

RecordTurn = Callable[[router_pb2.SessionRecord, common_pb2.ChatMessage], None]
"""Writes a finished turn's answer into the record."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt whose answers may begin.

    Attributes:
        readout: what hops report about the prompt; None: nothing is asked.
        num_past_tokens: how many first tokens of the prompt the hops held after the session's last turn.
    """

    running: RunningRequest
    prompt_ids: Sequence[int]
    max_tokens: int
    room: AnswerRoom
    adapter: AdapterVersion | None
    readout: PromptReadout | None
    num_past_tokens: int


class _SharedPrompt:
    """A prompt with several answers: one session processes it, and waits until `num_forks` others have forked it."""

    def __init__(self, num_forks: int) -> None:
        self.source: asyncio.Future[ChainSession] = asyncio.get_running_loop().create_future()
        self._processed = asyncio.Event()
        self._num_forks_left = num_forks
        self._forked = asyncio.Event()

    async def prefill(
        self, session: ChainSession, new_ids: Sequence[int], readout: PromptReadout | None, answer: Answer
    ) -> None:
        """Processes the prompt in the first session, which then waits until the other sessions have forked it."""
        await session.prefill(new_ids, answer, waits=self._num_forks_left > 0, readout=readout)
        self._processed.set()
        if self._num_forks_left > 0:
            await self._forked.wait()

    async def fork(self, session: ChainSession, prompt_ids: Sequence[int], answer: Answer) -> None:
        """Forks the first session into another one when the prompt is processed."""
        await self._processed.wait()
        try:
            await session.fork_from(await self.source, prompt_ids, answer)
        finally:
            self.release()

    def release(self) -> None:
        """Records that one of the other sessions has forked, or needs no fork."""
        self._num_forks_left -= 1
        if self._num_forks_left <= 0:
            self._forked.set()


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers requests."""

    entrance: Entrance
    sessions: ChainSessions
    names: ModelNames
    factory: AnswerFactory
    transcripts: Transcripts

    def answer(
        self,
        request: AnyRequest,
        next_prompt: NextPrompt,
        record_turn: RecordTurn = lambda record, answer: None,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Answers a prompt: as the next turn of the request's session, or without a session, once or several times.

        Args:
            next_prompt: makes the prompt; it is called before the request's turn comes, so that a wrong prompt fails at
                once.

        Yields:
            Pairs `(index, delta)` as they come; the last delta of each index has a finish reason.
        """
        if request.session_id:
            return self._turn(request, next_prompt, record_turn)
        return self._completions(request, next_prompt)

    # --- without a session ------------------------------------------------------------------------------------------

    async def _completions(
        self, request: AnyRequest, next_prompt: NextPrompt
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Gives each answer a chain session of its own. The first one processes the prompt, and the others fork it."""
        async with self.entrance.enter(request) as running:
            meter = running.meter
            adapter = await self.names.resolve(request.adapter, request.caller.tenant)
            job = await self._job(running, router_pb2.SessionRecord(), next_prompt, adapter)
            num_prompt_tokens, readout = len(job.prompt_ids), job.readout
            if readout is not None and request.is_reading:
                await running.allowance.take_prompt(num_prompt_tokens, num_prompt_tokens)
                await running.ticket.admitted()
                await self._read_out(job, readout)
                for index in range(request.num_completions):
                    yield index, Delta(finish_reason=FinishReason.LENGTH, readout=None if index else readout)
                return
            begun = [await self._begun(job) for _ in range(request.num_completions)]
            if (reason := begun[0].finish_reason) is not None:
                # The caller has all tokens already, but not the finish reason.
                meter.count_prompt(num_prompt_tokens, num_prompt_tokens, 0)
                meter.count_finish(reason)
                yield 0, Delta(finish_reason=reason, stop_sequence=begun[0].stop_sequence)
                return
            await running.allowance.take_prompt(num_prompt_tokens, job.room.num_tokens)
            await running.ticket.admitted()
            unsent = [UnsentDeltas(request.resumption) for _ in begun]
            shared = _SharedPrompt(len(begun) - 1)
            streams = [self._stream(job, index, answer, shared) for index, answer in enumerate(begun)]
            async with aclosing(merge(streams)) as merged:
                async for index, deltas in merged:
                    meter.count_tokens(index, sum(len(each.tokens) for each in deltas))
                    if (left := unsent[index].select(deltas)) is not None:
                        if readout is not None and readout.is_complete:
                            left, readout = replace(left, readout=readout), None
                        meter.count_finish(left.finish_reason)
                        yield index, left

    async def _read_out(self, job: _Job, readout: PromptReadout) -> None:
        """Processes a prompt without an answer."""
        async with self._open(job, None, readout.shared_ids) as session:
            await session.restore(job.prompt_ids)
            job.running.meter.count_prompt(len(job.prompt_ids), session.position, 0)
            await session.read_out(job.prompt_ids[session.position :], readout)

    async def _stream(
        self, job: _Job, index: int, answer: Answer, shared: _SharedPrompt
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """Generates one of the answers to a prompt, in a session that ends with the answer."""
        running, text_ids = job.running, [*job.prompt_ids, *answer.token_ids]
        async with AsyncExitStack() as stack:
            if index == 0:
                # Hops may have cached what a readout does not ask about.
                shared_ids = text_ids if job.readout is None else job.readout.shared_ids
                session = await stack.enter_async_context(self._open(job, answer, shared_ids))
                running.check_drafts(session)
                await session.restore(text_ids)
                running.meter.count_prompt(len(job.prompt_ids), min(session.position, len(job.prompt_ids)), 0)
                shared.source.set_result(session)
                await shared.prefill(session, text_ids[session.position :], job.readout, answer)
            else:
                source = await shared.source
                try:
                    session = await stack.enter_async_context(self._open(job, answer, text_ids, index, source.chain))
                except CorollaError:
                    # The first answer's chain has no room; another chain may have some.
                    shared.release()
                    session = await stack.enter_async_context(self._open(job, answer, text_ids, index))
                    await session.restore(text_ids)
                    await session.prefill(text_ids[session.position :], answer)
                else:
                    await shared.fork(session, text_ids, answer)
            yield answer.deltas()
            while answer.finish_reason is None:
                yield await next_deltas(session, answer, partial(job.room.grow, index), running.meter.count_drafts)

    @asynccontextmanager
    async def _open(
        self,
        job: _Job,
        answer: Answer | None,
        shared_ids: Sequence[int],
        index: int = 0,
        chain: common_pb2.Chain | None = None,
    ) -> AsyncIterator[ChainSession]:
        """Opens a session until the context ends: on `chain` only or, without one, on the best chain.

        Hops may have cached a beginning of `shared_ids`, without the last of these tokens.
        """
        identity = SessionIdentity(secrets.token_bytes(16), 1, job.running.request.caller.tenant)
        options = _open_options(job, shared_ids, transient=True, only_chain=chain)
        async with self._opened(job, answer, identity, options, index) as session:
            try:
                yield session
            finally:
                session.close()

    # --- turns ------------------------------------------------------------------------------------------------------

    async def _turn(
        self, request: AnyRequest, next_prompt: NextPrompt, record_turn: RecordTurn
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Runs one turn of the request's session. A turn that does not finish leaves its session unchanged.

        A turn that has a name runs only once: a second request of this name gets the recorded answer.
        """
        async with self.entrance.enter(request) as running, AsyncExitStack() as stack:
            meter, tenant = running.meter, request.caller.tenant
            if running.ticket.is_waiting:
                await self._check(request, next_prompt)
            await running.ticket.admitted()
            stored_bytes = running.allowance.limits.stored_session_bytes
            locking = self.transcripts.turn(
                request.session_id, tenant, request.turn_name, stored_bytes, request.num_bytes
            )
            with self.entrance.quotas.counted_refusals():
                turn = await stack.enter_async_context(locking)
            if _is_repeated(request, turn.record):
                replayed = await self.factory.replayed(turn.record, request)
                meter.count_finish(replayed[-1].finish_reason)
                for delta in request.resumption.unsent_of(replayed):
                    yield 0, delta
                return
            adapter = await self.names.of_session(turn.record, request.adapter, tenant)
            job = await self._job(running, turn.record, next_prompt, adapter)
            await running.allowance.take_prompt(len(job.prompt_ids), job.room.num_tokens)
            answer = await self._begun(job)
            if answer.finish_reason is not None:
                # The caller has all tokens: the hops make the last one again, and the turn ends.
                shorter = replace(running.request, resumption=request.resumption.without_last())
                job = replace(job, running=replace(running, request=shorter))
                answer = await self._begun(job)
            session = await stack.enter_async_context(self._open_turn(job, turn, answer))
            await session.prefill([*job.prompt_ids, *answer.token_ids][session.position :], answer)
            unsent = UnsentDeltas(job.running.request.resumption)
            deltas: Sequence[Delta] = answer.deltas()
            while True:
                meter.count_tokens(0, sum(len(each.tokens) for each in deltas))
                left = unsent.select(deltas)
                if answer.finish_reason is not None:
                    # The record is written before the end is sent: the next turn may follow at once.
                    _write_back(job, turn.record, answer, session, record_turn)
                    await turn.commit()
                if left is not None:
                    meter.count_finish(left.finish_reason)
                    yield 0, left
                if answer.finish_reason is not None:
                    return
                deltas = await next_deltas(session, answer, partial(job.room.grow, 0), meter.count_drafts)

    async def _check(self, request: AnyRequest, next_prompt: NextPrompt) -> None:
        """Checks a turn before it waits: a text that is too long now stays too long, since sessions only grow."""
        try:
            record = await self.transcripts.get(request.session_id, request.caller.tenant)
        except (RouterUnavailable, StoreUnavailable):
            return  # the router may be back when the turn begins
        if not _is_repeated(request, record):
            await self.names.of_session(record, request.adapter, record.tenant)
            await self.factory.prompt(next_prompt, record, request)

    @asynccontextmanager
    async def _open_turn(self, job: _Job, turn: Turn, answer: Answer) -> AsyncIterator[ChainSession]:
        """Opens the session on the hops of its last turn, if they are there, and parks it at the end of the context.

        The hops then hold the text of the last turn, or of this one if it is committed.
        """
        running, record = job.running, turn.record
        text_ids = [*job.prompt_ids, *answer.token_ids]
        earlier = common_pb2.Chain.FromString(record.chain.SerializeToString())
        num_past_tokens = job.num_past_tokens if earlier.hops else 0
        options = _open_options(
            job,
            text_ids,
            transient=False,
            lease_ms=self.transcripts.ttl_ms,
            recorded_chain=earlier if earlier.hops else None,
            max_position=num_past_tokens if earlier.hops else None,
        )
        identity = SessionIdentity.of_turn(record.session_id, record.epoch, record.tenant)
        async with self._opened(job, answer, identity, options) as session:
            try:
                running.check_drafts(session)
                await session.restore(text_ids, num_past_tokens)
                num_lost_tokens = max(0, job.num_past_tokens - session.position)
                num_cached_tokens = min(session.num_cached_tokens, len(job.prompt_ids))
                running.meter.count_prompt(len(job.prompt_ids), num_cached_tokens, num_lost_tokens)
                yield session
            finally:
                session.park(
                    record.position if turn.committed else job.num_past_tokens,
                    earlier=earlier,
                    recorded=record.chain if turn.committed else earlier,
                )

    # --- what both have in common -----------------------------------------------------------------------------------

    async def _job(
        self,
        running: RunningRequest,
        record: router_pb2.SessionRecord,
        next_prompt: NextPrompt,
        adapter: AdapterVersion | None,
    ) -> _Job:
        request = running.request
        num_kept_tokens, prompt_ids, max_tokens = await self.factory.prompt(next_prompt, record, request)
        room = self.factory.room(running.allowance, len(prompt_ids), max_tokens, request)
        readout = None if request.readout is None else request.readout(prompt_ids)
        num_past_tokens = min(num_kept_tokens, record.position)
        return _Job(running, prompt_ids, max_tokens, room, adapter, readout, num_past_tokens)

    async def _begun(self, job: _Job) -> Answer:
        return await self.factory.begun(job.prompt_ids, job.max_tokens, job.running.request)

    @asynccontextmanager
    async def _opened(
        self, job: _Job, answer: Answer | None, identity: SessionIdentity, options: OpenOptions, index: int = 0
    ) -> AsyncIterator[ChainSession]:
        running = job.running
        sampler = self.factory.sampler(running.request, job.prompt_ids, max(1, job.max_tokens), index)
        count_recovery = running.recovery_counter(answer)
        async with self.sessions.open(identity, options, sampler, count_recovery, running.until_s) as session:
            if session.mixes_numerics and answer is not None:
                running.meter.count_doubt(0)
            yield session


def _open_options(job: _Job, text_ids: Sequence[int], **further: Any) -> OpenOptions:
    return OpenOptions(
        max_tokens=job.room.first_tokens,
        most_tokens=len(job.prompt_ids) + job.max_tokens,
        texts=[TextDigests(text_ids)],
        cache_salt=job.running.request.cache_salt,
        standby=job.running.request.standby,
        adapter=job.adapter,
        **further,
    )


def _is_repeated(request: AnyRequest, record: router_pb2.SessionRecord) -> bool:
    """True if the request's turn was the session's last one, so that its answer is recorded."""
    return bool(request.turn_name) and record.last_turn == request.turn_name


def _write_back(
    job: _Job, record: router_pb2.SessionRecord, answer: Answer, session: ChainSession, record_turn: RecordTurn
) -> None:
    request = job.running.request
    record_turn(record, answer.message)
    record.chain.CopyFrom(session.chain_to_record)
    record.position = session.position
    record.token_log[:] = [*job.prompt_ids, *answer.token_ids]
    write_last_answer(record, answer, request.turn_name)
    record.num_turns += 1
    record.turns.add(
        number=record.num_turns,
        num_messages=len(record.transcript),
        finish_reason=record.last_finish_reason,
        prompt_tokens=len(job.prompt_ids),
        completion_tokens=len(answer.tokens),
        ended_s=int(time.time()),
        note=request.caller.note,
    )
