"""From a checked request to the tokens of its answer: the chain is opened, used and given back here.

Everything that an answer takes is held by a context: finish, cancellation and failure leave through the same exit.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from corolla.chassis.errors import ContextLengthExceeded
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.opener import ChainOpener
from corolla.client.chain.reservations import OpenOptions
from corolla.client.chain.session import ChainSession
from corolla.client.generation.admission import Admission, RequestMeter
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.loop import generate
from corolla.client.generation.merge import merge
from corolla.client.generation.options import AnswerOptions
from corolla.client.generation.sampling import Sampler
from corolla.client.generation.speculator import Speculator, Speculators
from corolla.client.generation.stopping import StopDecider
from corolla.client.generation.usage import Usage
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.transcripts import Transcripts
from corolla.v1 import common_pb2, router_pb2

NextPrompt = Callable[[router_pb2.SessionRecord], tuple[int, Sequence[int]]]
"""A session's record to its new token log, and how many of its first tokens are those of the old one."""

Remember = Callable[[router_pb2.SessionRecord, str], None]
"""Writes a finished turn's text into the record."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds an answer."""

    context_length: int
    default_max_tokens: int
    eos_token_ids: frozenset[int]


class Answering:
    """Makes answers."""

    def __init__(
        self,
        opener: ChainOpener,
        transcripts: Transcripts,
        tokenizer: TextTokenizer,
        limits: ModelLimits,
        admission: Admission,
        speculators: Speculators,
    ) -> None:
        self._opener = opener
        self._transcripts = transcripts
        self._tokenizer = tokenizer
        self._limits = limits
        self._admission = admission
        self._speculators = speculators

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull where a request of this tenant would be refused."""
        self._admission.check(tenant)

    async def complete(
        self, tenant: str, prompt_ids: Sequence[int], options: AnswerOptions, num_completions: int, usage: Usage
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Answers a prompt once or several times, in sessions that end with the answer.

        Yields:
            `(index, delta)` as they come; of each index the last has a finish reason.
        """
        self._speculators.check(options.speculation)
        max_tokens = self._max_tokens(len(prompt_ids), options)
        async with self._admission.request(tenant, usage) as meter:
            answers = [
                self._complete_one(tenant, prompt_ids, _seeded(options, index), max_tokens, index, meter)
                for index in range(num_completions)
            ]
            async with aclosing(merge(answers)) as deltas:
                async for delta in deltas:
                    yield delta

    async def continue_session(
        self,
        tenant: str,
        session_id: str,
        next_prompt: NextPrompt,
        remember: Remember,
        options: AnswerOptions,
        usage: Usage,
    ) -> AsyncGenerator[Delta, None]:
        """Runs one turn of a session. If it does not finish, the session stays as it was before."""
        self._speculators.check(options.speculation)
        async with (
            self._admission.request(tenant, usage) as meter,
            self._transcripts.turn(session_id, tenant) as turn,
        ):
            record = turn.record
            earlier = common_pb2.Chain()
            earlier.CopyFrom(record.chain)
            num_kept_tokens, prompt_ids = await asyncio.to_thread(next_prompt, record)
            max_tokens = self._max_tokens(len(prompt_ids), options)
            identity = SessionIdentity.of_turn(session_id, record.epoch, tenant)
            opening = OpenOptions(
                max_tokens=len(prompt_ids) + max_tokens,
                transient=False,
                lease_ms=self._transcripts.ttl_ms,
                recorded=earlier,
                record_id=session_id,
                texts=[prompt_ids],
                max_position=min(num_kept_tokens, record.position) if earlier.hops else None,
            )
            async with self._opener.open(identity, opening, meter.recovered) as session:
                position = num_past_tokens = min(num_kept_tokens, record.position)
                try:
                    await session.take_up(prompt_ids, num_past_tokens if earlier.hops else 0)
                    num_lost_tokens = max(0, num_past_tokens - session.position)
                    meter.prompt(len(prompt_ids), session.num_cached_tokens, num_lost_tokens)
                    sampler = self._sampler(options, prompt_ids, record.sampler_state)
                    answer = self._answer(prompt_ids, max_tokens, options)
                    speculator = self._speculators.make(options.speculation, sampler, prompt_ids, meter.draft)
                    new_ids = prompt_ids[session.position :]
                    deltas = self._deltas(session, sampler, answer, new_ids, 0, meter, speculator)
                    async with aclosing(deltas):
                        async for delta in deltas:
                            if delta.finish_reason is not None:
                                # Before the caller learns of the end: the next turn may follow at once.
                                remember(record, answer.text)
                                _write_back(record, session, prompt_ids, answer, sampler)
                                await turn.commit()
                                position = session.position
                            yield delta
                finally:
                    recorded = record.chain if turn.committed else earlier
                    session.park(position, earlier=earlier, recorded=recorded)

    async def _complete_one(
        self,
        tenant: str,
        prompt_ids: Sequence[int],
        options: AnswerOptions,
        max_tokens: int,
        index: int,
        meter: RequestMeter,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        identity = SessionIdentity(secrets.token_bytes(16), 1, tenant)
        opening = OpenOptions(max_tokens=len(prompt_ids) + max_tokens, transient=True, texts=[prompt_ids])
        async with self._opener.open(identity, opening, meter.recovered) as session:
            try:
                await session.take_up(prompt_ids)
                if index == 0:
                    meter.prompt(len(prompt_ids), session.position, 0)
                sampler = self._sampler(options, prompt_ids, b"")
                answer = self._answer(prompt_ids, max_tokens, options)
                speculator = self._speculators.make(options.speculation, sampler, prompt_ids, meter.draft)
                new_ids = prompt_ids[session.position :]
                deltas = self._deltas(session, sampler, answer, new_ids, index, meter, speculator)
                async with aclosing(deltas):
                    async for delta in deltas:
                        yield index, delta
            finally:
                session.close()

    async def _deltas(
        self,
        session: ChainSession,
        sampler: Sampler,
        answer: Answer,
        new_prompt_ids: Sequence[int],
        index: int,
        meter: RequestMeter,
        speculator: Speculator | None,
    ) -> AsyncGenerator[Delta, None]:
        async with aclosing(generate(session, sampler, answer, new_prompt_ids, meter.started_s, speculator)) as deltas:
            async for delta in deltas:
                meter.token(index)
                if delta.finish_reason is not None:
                    meter.finished(delta.finish_reason)
                yield delta

    def _max_tokens(self, num_prompt_tokens: int, options: AnswerOptions) -> int:
        room = self._limits.context_length - num_prompt_tokens
        wanted = 1 if options.max_tokens is None else options.max_tokens
        if wanted > room:
            raise ContextLengthExceeded(
                "stopping.max_tokens" if room > 0 else "prompt",
                f"{num_prompt_tokens} prompt tokens and {wanted} new ones exceed the model's context of "
                f"{self._limits.context_length} tokens",
            )
        return min(self._limits.default_max_tokens, room) if options.max_tokens is None else wanted

    def _sampler(self, options: AnswerOptions, prompt_ids: Sequence[int], state: bytes) -> Sampler:
        """With a seed the random stream begins there; without one a session's stream goes on."""
        has_past = bool(state) and options.sampling.seed is None
        return Sampler(options.sampling, prompt_ids, state=state if has_past else None)

    def _answer(self, prompt_ids: Sequence[int], max_tokens: int, options: AnswerOptions) -> Answer:
        decider = StopDecider(
            max_new_tokens=max_tokens,
            eos_token_ids=self._limits.eos_token_ids,
            ignore_eos=options.ignore_eos,
            time_limit_s=options.time_limit_s,
        )
        return Answer(self._tokenizer, prompt_ids, decider, options.stop_sequences)


def _seeded(options: AnswerOptions, index: int) -> AnswerOptions:
    seed = options.sampling.seed
    if seed is None or index == 0:
        return options
    return replace(options, sampling=replace(options.sampling, seed=seed + index))


def _write_back(
    record: router_pb2.SessionRecord,
    session: ChainSession,
    prompt_ids: Sequence[int],
    answer: Answer,
    sampler: Sampler,
) -> None:
    record.chain.CopyFrom(session.resting_chain)
    record.position = session.position
    record.token_log[:] = [*prompt_ids, *answer.token_ids]
    record.sampler_state = sampler.state()
    record.num_turns += 1
