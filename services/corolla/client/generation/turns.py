"""Answers requests as turns of their sessions. A turn that does not finish leaves its session unchanged."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from corolla.chain.identity import SessionIdentity
from corolla.chain.reservations import OpenOptions
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chassis.errors import RouterUnavailable, StoreUnavailable
from corolla.client.adapters import ModelNames
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.answer_factory import AnswerFactory, NextPrompt
from corolla.client.generation.answer_room import AnswerRoom
from corolla.client.generation.last_answer import write_last_answer
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.resumption import UnsentDeltas
from corolla.client.generation.running_request import Entrance, RunningRequest
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.text.conversation import Message
from corolla.client.transcripts import Transcripts, Turn
from corolla.decoding.sampler_record import SamplerRecord
from corolla.v1 import common_pb2, router_pb2

RecordTurn = Callable[[router_pb2.SessionRecord, Message], None]
"""Writes a finished turn's answer into the record."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A turn whose answer may begin.

    `num_past_tokens`: how many first tokens of the prompt the hops held after the last turn.
    """

    running: RunningRequest
    turn: Turn
    prompt_ids: Sequence[int]
    max_tokens: int
    num_past_tokens: int
    answer: Answer
    sampler: SamplerRecord

    @property
    def text_ids(self) -> list[int]:
        """The prompt, and the tokens of the answer so far."""
        return [*self.prompt_ids, *self.answer.token_ids]


@dataclass(frozen=True, slots=True)
class Turns:
    """Runs turns. One that has a name runs only once: a second request of this name gets the recorded answer."""

    entrance: Entrance
    sessions: ChainSessions
    names: ModelNames
    factory: AnswerFactory
    transcripts: Transcripts
    quotas: QuotaEnforcer

    async def answer(
        self, request: AnyRequest, next_prompt: NextPrompt, record_turn: RecordTurn
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Runs one turn of the request's session."""
        async with self.entrance.enter(request) as running, AsyncExitStack() as stack:
            request, meter = running.request, running.meter
            if running.ticket.is_waiting:
                await self._check(request, next_prompt)
            await running.ticket.admitted()
            stored_bytes = running.allowance.limits.stored_session_bytes
            locking = self.transcripts.turn(
                request.session_id, request.caller.tenant, request.turn_name, stored_bytes, request.num_bytes
            )
            with self.quotas.counted_refusals():
                turn = await stack.enter_async_context(locking)
            if _is_repeated(request, turn.record):
                replayed = await self.factory.replayed(turn.record, request)
                meter.count_finish(replayed[-1].finish_reason)
                for delta in request.resumption.unsent_of(replayed):
                    yield 0, delta
                return
            num_kept_tokens, prompt_ids, max_tokens = await self._prompt(turn.record, next_prompt, request)
            room = self.factory.room(running.allowance, len(prompt_ids), max_tokens, request)
            await running.allowance.take_prompt(len(prompt_ids), room.num_tokens)
            answer = await self.factory.begun(prompt_ids, max_tokens, request)
            if answer.finish_reason is not None:
                # The caller has all tokens: the hops make the last one again, and the turn ends.
                request = replace(request, resumption=request.resumption.without_last())
                running = replace(running, request=request)
                answer = await self.factory.begun(prompt_ids, max_tokens, request)
            num_past_tokens = min(num_kept_tokens, turn.record.position)
            sampler = self.factory.sampler(request, prompt_ids, max_tokens)
            job = _Job(running, turn, prompt_ids, max_tokens, num_past_tokens, answer, sampler)
            session = await stack.enter_async_context(self._open(job, room))
            prefill = partial(session.prefill, job.text_ids[session.position :])
            unsent = UnsentDeltas(request.resumption)
            async with aclosing(running.deltas(session, answer, prefill, room)) as all_deltas:
                async for deltas in all_deltas:
                    meter.count_tokens(0, sum(len(each.tokens) for each in deltas))
                    left = unsent.select(deltas)
                    if deltas[-1].finish_reason is not None:
                        # The record is written before the end is sent: the next turn may follow at once.
                        _write_back(job, session, record_turn)
                        await turn.commit()
                    if left is not None:
                        meter.count_finish(left.finish_reason)
                        yield 0, left

    async def _check(self, request: AnyRequest, next_prompt: NextPrompt) -> None:
        """Checks a turn before it waits: a text that is too long now stays too long, since sessions only grow."""
        try:
            record = await self.transcripts.get(request.session_id, request.caller.tenant)
        except (RouterUnavailable, StoreUnavailable):
            return  # the router may be back when the turn begins
        if not _is_repeated(request, record):
            await self._prompt(record, next_prompt, request)

    async def _prompt(
        self, record: router_pb2.SessionRecord, next_prompt: NextPrompt, request: AnyRequest
    ) -> tuple[int, Sequence[int], int]:
        """Returns how many first tokens the new token log shares with the old one, the new log, and the token limit."""
        await self.names.of_session(record, request.adapter, record.tenant)
        return await self.factory.prompt(next_prompt, record, request)

    @asynccontextmanager
    async def _open(self, job: _Job, room: AnswerRoom) -> AsyncIterator[ChainSession]:
        """Opens the session on the hops of its last turn, if they are there, and parks it at the end of the context.

        The hops then hold the text of the last turn, or of this one if it is committed.
        """
        running, request, record = job.running, job.running.request, job.turn.record
        earlier = common_pb2.Chain.FromString(record.chain.SerializeToString())
        num_past_tokens = job.num_past_tokens if earlier.hops else 0
        tenant = request.caller.tenant
        open_options = OpenOptions(
            max_tokens=room.first_tokens,
            most_tokens=len(job.prompt_ids) + job.max_tokens,
            transient=False,
            lease_ms=self.transcripts.ttl_ms,
            recorded_chain=earlier,
            record_id=request.session_id,
            texts=[job.text_ids],
            cache_salt=request.cache_salt,
            adapter=await self.names.of_session(record, request.adapter, tenant),
            max_position=num_past_tokens if earlier.hops else None,
        )
        identity = SessionIdentity.of_turn(request.session_id, record.epoch, tenant)
        count_recovery = running.recovery_counter(job.answer)
        async with self.sessions.open(identity, open_options, job.sampler, count_recovery, running.until_s) as session:
            try:
                running.check_drafts(session)
                await session.restore(job.text_ids, num_past_tokens)
                num_lost_tokens = max(0, job.num_past_tokens - session.position)
                num_cached_tokens = min(session.num_cached_tokens, len(job.prompt_ids))
                running.meter.count_prompt(len(job.prompt_ids), num_cached_tokens, num_lost_tokens)
                yield session
            finally:
                is_over = job.turn.committed
                session.park(
                    record.position if is_over else job.num_past_tokens,
                    earlier=earlier,
                    recorded=record.chain if is_over else earlier,
                )


def _is_repeated(request: AnyRequest, record: router_pb2.SessionRecord) -> bool:
    """True if the request's turn was the session's last one, so that its answer is recorded."""
    return bool(request.turn_name) and record.last_turn == request.turn_name


def _write_back(job: _Job, session: ChainSession, record_turn: RecordTurn) -> None:
    record, request, answer = job.turn.record, job.running.request, job.answer
    record_turn(record, answer.message)
    record.chain.CopyFrom(session.chain_to_record)
    record.position = session.position
    record.token_log[:] = job.text_ids
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
