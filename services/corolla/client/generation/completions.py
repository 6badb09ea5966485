"""Answers a prompt without a session, once or several times. Each answer has a chain session that ends with it."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from corolla.chain.identity import SessionIdentity
from corolla.chain.prompt_readout import PromptReadout
from corolla.chain.reservations import OpenOptions
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chassis.errors import CorollaError
from corolla.chassis.merge import merge
from corolla.client.adapters import ModelNames
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.answer_factory import AnswerFactory, NextPrompt
from corolla.client.generation.answer_room import AnswerRoom
from corolla.client.generation.loop import Prefill, SharedPrompt
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.resumption import UnsentDeltas
from corolla.client.generation.running_request import Entrance, RunningRequest
from corolla.decoding.sampler_record import SamplerRecord
from corolla.decoding.stopping import FinishReason
from corolla.v1 import common_pb2, router_pb2
from corolla.wire.adapter_version import AdapterVersion


@dataclass(frozen=True, slots=True)
class _Job:
    """The data that the answers to one prompt share."""

    running: RunningRequest
    prompt_ids: Sequence[int]
    max_tokens: int
    room: AnswerRoom
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


@dataclass(frozen=True, slots=True)
class Completions:
    """Answers prompts without a session."""

    entrance: Entrance
    sessions: ChainSessions
    names: ModelNames
    factory: AnswerFactory

    async def answer(self, request: AnyRequest, next_prompt: NextPrompt) -> AsyncGenerator[tuple[int, Delta], None]:
        """Gives each answer a session of its own. The first session processes the prompt, and the others fork it."""
        async with self.entrance.enter(request) as running:
            request, meter = running.request, running.meter
            job = await self._job(running, next_prompt)
            num_prompt_tokens = len(job.prompt_ids)
            if job.readout is not None and request.is_reading:
                await running.allowance.take_prompt(num_prompt_tokens, num_prompt_tokens)
                await running.ticket.admitted()
                await self._read_out(job, job.readout)
                for index in range(request.num_completions):
                    yield index, Delta((), "", FinishReason.LENGTH, readout=None if index else job.readout)
                return
            begun = [
                await self.factory.begun(job.prompt_ids, job.max_tokens, request)
                for _ in range(request.num_completions)
            ]
            if (reason := begun[0].finish_reason) is not None:
                # The caller has all tokens already, but not the finish reason.
                meter.count_prompt(num_prompt_tokens, num_prompt_tokens, 0)
                meter.count_finish(reason)
                yield 0, Delta((), "", reason, stop_sequence=begun[0].stop_sequence)
                return
            await running.allowance.take_prompt(num_prompt_tokens, job.room.num_tokens)
            await running.ticket.admitted()
            unsent = [UnsentDeltas(request.resumption) for _ in begun]
            is_read = False
            streams = [self._stream(job, index, answer) for index, answer in enumerate(begun)]
            async with aclosing(merge(streams)) as merged:
                async for index, deltas in merged:
                    meter.count_tokens(index, sum(len(each.tokens) for each in deltas))
                    if (left := unsent[index].select(deltas)) is not None:
                        delta = job.with_readout(left, is_read)
                        is_read = is_read or delta.readout is not None
                        meter.count_finish(delta.finish_reason)
                        yield index, delta

    async def _job(self, running: RunningRequest, next_prompt: NextPrompt) -> _Job:
        request = running.request
        adapter = await self.names.resolve(request.adapter, request.caller.tenant)
        _, prompt_ids, max_tokens = await self.factory.prompt(next_prompt, router_pb2.SessionRecord(), request)
        room = self.factory.room(running.allowance, len(prompt_ids), max_tokens, request)
        readout = None if request.readout is None else request.readout(prompt_ids)
        shared = SharedPrompt(request.num_completions - 1)
        return _Job(running, prompt_ids, max_tokens, room, adapter, shared, readout)

    async def _read_out(self, job: _Job, readout: PromptReadout) -> None:
        """Processes a prompt without an answer."""
        sampler = self.factory.sampler(job.running.request, job.prompt_ids, 1)
        async with self._open(job, None, readout.shared_ids, sampler, None) as session:
            await session.restore(job.prompt_ids)
            job.running.meter.count_prompt(len(job.prompt_ids), session.position, 0)
            await session.read_out(job.prompt_ids[session.position :], readout)

    async def _stream(self, job: _Job, index: int, answer: Answer) -> AsyncGenerator[Sequence[Delta], None]:
        """Generates one of the answers to a prompt, in a session that ends with the answer."""
        running = job.running
        sampler = self.factory.sampler(running.request, job.prompt_ids, job.max_tokens, index)
        text_ids = [*job.prompt_ids, *answer.token_ids]
        async with AsyncExitStack() as stack:
            prefill: Prefill
            if index == 0:
                session = await stack.enter_async_context(
                    self._open(job, answer, job.shared_ids(text_ids), sampler, None)
                )
                running.check_drafts(session)
                await session.restore(text_ids)
                running.meter.count_prompt(len(job.prompt_ids), min(session.position, len(job.prompt_ids)), 0)
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
            all_deltas = running.deltas(session, answer, prefill, job.room, index)
            async for deltas in await stack.enter_async_context(aclosing(all_deltas)):
                yield deltas

    @asynccontextmanager
    async def _open(
        self,
        job: _Job,
        answer: Answer | None,
        shared_ids: Sequence[int],
        sampler: SamplerRecord,
        chain: common_pb2.Chain | None,
    ) -> AsyncIterator[ChainSession]:
        """Opens a session until the context ends: on `chain` only or, without one, on the best chain.

        Hops may have cached a beginning of `shared_ids`, without the last of these tokens.
        """
        request = job.running.request
        identity = SessionIdentity(secrets.token_bytes(16), 1, request.caller.tenant)
        open_options = OpenOptions(
            max_tokens=job.room.first_tokens,
            most_tokens=len(job.prompt_ids) + job.max_tokens,
            transient=True,
            texts=[shared_ids],
            cache_salt=request.cache_salt,
            adapter=job.adapter,
            only_chain=chain,
        )
        count_recovery = job.running.recovery_counter(answer)
        async with self.sessions.open(identity, open_options, sampler, count_recovery, job.running.until_s) as session:
            try:
                yield session
            finally:
                session.close()
