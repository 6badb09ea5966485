"""From a checked request to the tokens of its answer: the chain is opened, used and given back here.

Everything that an answer takes is held by a context: finish, cancellation and failure leave through the same exit.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from corolla.chassis.errors import ContextLengthExceeded, RouterUnavailable, StoreUnavailable
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.opener import ChainOpener
from corolla.client.chain.reservations import OpenOptions
from corolla.client.chain.session import ChainSession
from corolla.client.generation.admission import Admission, RequestMeter
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.caller import Caller
from corolla.client.generation.loop import generate
from corolla.client.generation.merge import merge
from corolla.client.generation.options import AnswerOptions
from corolla.client.generation.resumption import Missing, told_again
from corolla.client.generation.sampling import Sampler
from corolla.client.generation.speculator import Speculators
from corolla.client.generation.stopping import FinishReason, StopDecider
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

    async def complete(
        self, caller: Caller, encode: Callable[[], Sequence[int]], options: AnswerOptions, num_completions: int
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Answers a prompt once or several times, in sessions that end with the answer.

        Args:
            encode: gives the prompt's ids. It works while the request waits for its turn, so that what is wrong with
                the prompt is known at once, and no more prompts are encoded than may wait.

        Yields:
            `(index, delta)` as they come; of each index the last has a finish reason.
        """
        tenant, until_s = caller.tenant, caller.waits_until_s(options.time_limit_s)
        self._speculators.check(options.speculation)
        async with self._admission.request(tenant, caller.num_bytes, caller.usage) as meter:
            prompt_ids = await asyncio.to_thread(encode)
            max_tokens = self._max_tokens(len(prompt_ids), options)
            answers = [
                self._complete_one(tenant, prompt_ids, _seeded(options, index), max_tokens, index, meter, until_s)
                for index in range(num_completions)
            ]
            async with meter.running(), aclosing(merge(answers)) as deltas:
                async for delta in deltas:
                    yield delta

    async def continue_session(
        self, caller: Caller, session_id: str, next_prompt: NextPrompt, remember: Remember, options: AnswerOptions
    ) -> AsyncGenerator[Delta, None]:
        """Runs one turn of a session. If it does not finish, the session stays as it was before.

        A turn that its caller named is run once: asked for again, it is told again.
        """
        tenant, until_s = caller.tenant, caller.waits_until_s(options.time_limit_s)
        self._speculators.check(options.speculation)
        resumption = options.resumption
        turn_name = "" if resumption is None else resumption.name_of_turn(tenant)
        async with AsyncExitStack() as stack:
            meter = await stack.enter_async_context(self._admission.request(tenant, caller.num_bytes, caller.usage))
            if meter.must_wait:
                await self._check_turn(session_id, tenant, turn_name, next_prompt, options)
            await stack.enter_async_context(meter.running())
            turn = await stack.enter_async_context(self._transcripts.turn(session_id, tenant, turn_name))
            record = turn.record
            if resumption is not None and record.last_turn == turn_name:
                for delta in resumption.missing_of(self._last_answer(record, options, caller.usage)):
                    yield delta
                return
            earlier = common_pb2.Chain()
            earlier.CopyFrom(record.chain)
            num_kept_tokens, prompt_ids, max_tokens = await self._prompt_of_turn(record, next_prompt, options)
            answer = self._answer(prompt_ids, max_tokens, options)
            text_ids = [*prompt_ids, *answer.token_ids]
            identity = SessionIdentity.of_turn(session_id, record.epoch, tenant)
            opening = OpenOptions(
                max_tokens=len(prompt_ids) + max_tokens,
                transient=False,
                lease_ms=self._transcripts.ttl_ms,
                recorded=earlier,
                record_id=session_id,
                texts=[text_ids],
                max_position=min(num_kept_tokens, record.position) if earlier.hops else None,
            )
            async with self._opener.open(identity, opening, meter.recovered, until_s) as session:
                position = num_past_tokens = min(num_kept_tokens, record.position)
                try:
                    await session.take_up(text_ids, num_past_tokens if earlier.hops else 0)
                    num_lost_tokens = max(0, num_past_tokens - session.position)
                    meter.prompt(len(prompt_ids), min(session.num_cached_tokens, len(prompt_ids)), num_lost_tokens)
                    sampler = self._sampler(options, tenant, prompt_ids, record.sampler_state)
                    deltas = self._deltas(session, sampler, answer, text_ids, options, 0, meter)
                    async with aclosing(deltas):
                        async for delta in deltas:
                            if delta.finish_reason is not None:
                                # Before the caller learns of the end: the next turn may follow at once.
                                remember(record, answer.text)
                                _write_back(record, session, prompt_ids, answer, sampler, turn_name)
                                await turn.commit()
                                position = session.position
                            yield delta
                finally:
                    recorded = record.chain if turn.committed else earlier
                    session.park(position, earlier=earlier, recorded=recorded)

    async def _check_turn(
        self, session_id: str, tenant: str, turn_name: str, next_prompt: NextPrompt, options: AnswerOptions
    ) -> None:
        """Refuses a turn before it waits for what it would be refused for at its turn: sessions only grow."""
        try:
            record = await self._transcripts.get(session_id, tenant)
        except (RouterUnavailable, StoreUnavailable):
            return  # they may be back by then
        if not turn_name or record.last_turn != turn_name:
            await self._prompt_of_turn(record, next_prompt, options)

    async def _prompt_of_turn(
        self, record: router_pb2.SessionRecord, next_prompt: NextPrompt, options: AnswerOptions
    ) -> tuple[int, Sequence[int], int]:
        """The next token log, how many of its first tokens are those of the old one, and how many may follow."""
        num_kept_tokens, prompt_ids = await asyncio.to_thread(next_prompt, record)
        return num_kept_tokens, prompt_ids, self._max_tokens(len(prompt_ids), options)

    async def _complete_one(
        self,
        tenant: str,
        prompt_ids: Sequence[int],
        options: AnswerOptions,
        max_tokens: int,
        index: int,
        meter: RequestMeter,
        until_s: float,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        answer = self._answer(prompt_ids, max_tokens, options)
        text_ids = [*prompt_ids, *answer.token_ids]
        identity = SessionIdentity(secrets.token_bytes(16), 1, tenant)
        opening = OpenOptions(max_tokens=len(prompt_ids) + max_tokens, transient=True, texts=[text_ids])
        async with self._opener.open(identity, opening, meter.recovered, until_s) as session:
            try:
                await session.take_up(text_ids)
                if index == 0:
                    meter.prompt(len(prompt_ids), min(session.position, len(prompt_ids)), 0)
                sampler = self._sampler(options, tenant, prompt_ids, b"")
                deltas = self._deltas(session, sampler, answer, text_ids, options, index, meter)
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
        text_ids: Sequence[int],
        options: AnswerOptions,
        index: int,
        meter: RequestMeter,
    ) -> AsyncGenerator[Delta, None]:
        """What the caller does not have yet of an answer.

        Args:
            text_ids: all tokens so far.
        """
        speculator = self._speculators.make(options.speculation, sampler, text_ids, meter.draft)
        new_ids = text_ids[session.position :]
        missing = Missing(options.resumption)
        async with aclosing(generate(session, sampler, answer, new_ids, meter.started_s, speculator)) as deltas:
            async for delta in deltas:
                meter.token(index)
                if missing.includes(delta):
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

    def _sampler(self, options: AnswerOptions, tenant: str, prompt_ids: Sequence[int], state: bytes) -> Sampler:
        """With a seed the random stream begins there; without one a session's stream goes on."""
        params, resumption = options.sampling, options.resumption
        has_past = bool(state) and params.seed is None
        received_ids: Sequence[int] = ()
        if resumption is not None:
            params, received_ids = resumption.seeded(params, tenant), resumption.received_ids
        return Sampler(
            params,
            prompt_ids,
            generated_ids=received_ids,
            num_skipped=len(received_ids),
            state=state if has_past else None,
        )

    def _answer(self, prompt_ids: Sequence[int], max_tokens: int, options: AnswerOptions) -> Answer:
        decider = StopDecider(
            max_new_tokens=max_tokens,
            eos_token_ids=self._limits.eos_token_ids,
            ignore_eos=options.ignore_eos,
            time_limit_s=options.time_limit_s,
        )
        answer = Answer(self._tokenizer, prompt_ids, decider, options.stop_sequences)
        if options.resumption is not None:
            options.resumption.take_up(answer)
        return answer

    def _last_answer(self, record: router_pb2.SessionRecord, options: AnswerOptions, usage: Usage) -> list[Delta]:
        """The answer of the session's last turn, which asks for no work."""
        num_prompt_tokens = len(record.token_log) - record.last_answer_tokens
        usage.prompt_tokens = usage.cached_tokens = num_prompt_tokens
        unbounded = StopDecider(
            max_new_tokens=len(record.token_log), eos_token_ids=frozenset(), ignore_eos=True, time_limit_s=None
        )
        prompt_ids = record.token_log[:num_prompt_tokens]
        answer = Answer(self._tokenizer, prompt_ids, unbounded, options.stop_sequences)
        return told_again(answer, record.token_log[num_prompt_tokens:], FinishReason(record.last_finish_reason))


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
    turn_name: str,
) -> None:
    record.chain.CopyFrom(session.resting_chain)
    record.position = session.position
    record.token_log[:] = [*prompt_ids, *answer.token_ids]
    record.sampler_state = sampler.state()
    record.num_turns += 1
    if answer.finish_reason is not None:
        record.last_turn, record.last_finish_reason = turn_name, answer.finish_reason.value
    record.last_answer_tokens = len(answer.token_ids)
