"""Callers: each conversation turn by turn, compared with the answers of the unsplit model."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

from corolla.chain.identity import SessionIdentity
from corolla.chain.recovery_budget import RecoveryReport
from corolla.chain.reservations import OpenOptions
from corolla.chain.session import ChainSession, ChainSessions
from corolla.chassis.errors import CorollaError, SessionBusy
from corolla.chassis.tenant_limits import StandbyMode
from corolla.client.generation.admission import Caller as RequestCaller
from corolla.client.generation.answering import Answering
from corolla.client.generation.request import AnswerRequest
from corolla.client.output_parsing.deltas import Delta
from corolla.decoding.sampler_record import SamplerRecord
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import router_pb2
from tests.simulation.scenario import GROWTH_TOKENS, Conversation, Turn
from tests.simulation.toy_model import ToyModel

MOST_SECONDS: Final = 60.0
"""The longest time that one request may take."""

_RETRIES: Final = 40
_RETRY_INTERVAL_S: Final = 1.0


@dataclass(eq=False)
class Completion:
    """One of the texts that a turn asked for.

    Attributes:
        expected: the tokens of one machine.
        session: of its hops, while it is open.
    """

    expected: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    session: ChainSession | None = None


@dataclass(eq=False)
class Answer:
    """What became of one turn.

    Attributes:
        conversation: its number.
        completions: none until the prompt is known.
        addresses: of all hops that it used.
        was_cut_off: the caller left, or the client service died.
    """

    conversation: int
    turn: Turn
    is_chat: bool
    is_first: bool
    completions: list[Completion] = field(default_factory=list)
    error: CorollaError | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    usage: pb.Usage = field(default_factory=pb.Usage)
    addresses: set[str] = field(default_factory=set)
    was_cut_off: bool = False
    task: "asyncio.Task[None] | None" = None


ASKING: ContextVar[Answer | None] = ContextVar("asking", default=None)
_INDEX: ContextVar[int] = ContextVar("index", default=0)


class WatchedAnswering(Answering):
    """The real class, which lets us see which session is whose."""

    async def _stream(self, job: Any, index: int, answer: Any, shared: Any) -> AsyncGenerator[Sequence[Delta], None]:
        _INDEX.set(index)
        async with aclosing(super()._stream(job, index, answer, shared)) as all_deltas:
            async for deltas in all_deltas:
                yield deltas


class WatchedSessions(ChainSessions):
    """The real class, which also shows its open sessions. All of them have the same mode of standbys."""

    def __init__(self, *args: Any, standby: StandbyMode) -> None:
        super().__init__(*args)
        self._standby: StandbyMode = standby
        self.open_sessions: dict[bytes, ChainSession] = {}

    @asynccontextmanager
    async def open(
        self,
        identity: SessionIdentity,
        options: OpenOptions,
        sampler: SamplerRecord,
        on_recovery: Callable[[RecoveryReport], None],
        until_s: float = math.inf,
    ) -> AsyncIterator[ChainSession]:
        answer = ASKING.get()
        options = replace(options, standby=self._standby)
        async with super().open(identity, options, sampler, on_recovery, until_s) as session:
            self.open_sessions[identity.session_id] = session
            if answer is not None:
                answer.completions[_INDEX.get()].session = session
                answer.addresses.update(hop.address for hop in session.chain.hops)
            try:
                yield session
            finally:
                self.open_sessions.pop(identity.session_id, None)
                if answer is not None and answer.completions[_INDEX.get()].session is session:
                    answer.completions[_INDEX.get()].session = None


class Caller:
    """Holds one conversation.

    Args:
        client: the client service of a number, as it is now.
        fault: called with each violation.
        delivered: called with each token that arrived, and the number of its completion.
        ended: called with each answer that ended.
        pages_are_scarce: whether answers that set no limit may end early.
    """

    def __init__(
        self,
        number: int,
        conversation: Conversation,
        model: ToyModel,
        client: Callable[[int], Any],
        fault: Callable[[str], None],
        delivered: Callable[[Answer, int], None],
        ended: Callable[[Answer], None],
        *,
        pages_are_scarce: bool,
    ) -> None:
        self.number = number
        self.answers: list[Answer] = []
        self._conversation = conversation
        self._model = model
        self._client = client
        self._fault = fault
        self._delivered = delivered
        self._ended = ended
        self._pages_are_scarce = pages_are_scarce
        # Every text that the conversation had after a turn that may have been written down.
        self._texts: list[list[int]] = [[]]
        self._has_left = False

    async def run(self) -> None:
        """Asks everything, each turn after the one before."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        session_id = ""
        for index, turn in enumerate(self._conversation.turns):
            await asyncio.sleep(max(0.0, began_s + turn.at_s - loop.time()))
            if self._has_left:
                return
            if self._conversation.is_chat and not session_id:
                session_id = await self._create(turn) or ""
                if not session_id:
                    return
            answer = Answer(self.number, turn, self._conversation.is_chat, index == 0, started_s=loop.time())
            self.answers.append(answer)
            await self._ask(answer, session_id)
            self._ended(answer)
            if answer.error is not None:
                return

    def leave(self) -> None:
        """The caller goes away in the middle of an answer, if there is one."""
        self._has_left = True
        for answer in self.answers:
            if answer.task is not None and not answer.task.done():
                answer.was_cut_off = True
                answer.task.cancel()

    def holds(self, session_id: bytes) -> bool:
        """Whether a session of this id is open for an answer."""
        sessions = [each.session for answer in self.answers for each in answer.completions]
        return any(each is not None and each.identity.session_id == session_id for each in sessions)

    async def _create(self, turn: Turn) -> str | None:
        """A new conversation's id; None where the control plane stays away."""
        for _ in range(_RETRIES):
            client = self._client(turn.client)
            # Nothing that runs in a process that has died, or is frozen, can be waited for without end: not even its
            # being cancelled.
            task = client.process.start(client.transcripts.create(self._conversation.tenant))
            done, _ = await asyncio.wait({task}, timeout=10.0)
            if done and not task.cancelled():
                try:
                    return str(task.result().session_id)
                except CorollaError:
                    pass
            task.cancel()
            await asyncio.sleep(_RETRY_INTERVAL_S)
        return None

    async def _ask(self, answer: Answer, session_id: str) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_RETRIES):
            client = self._client(answer.turn.client)
            answer.started_s = loop.time()
            answer.error = None
            task = answer.task = client.process.start(self._answer(answer, client.answering, session_id))
            died = asyncio.ensure_future(client.process.died.wait())
            try:
                await asyncio.wait({task, died}, timeout=MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                died.cancel()
            if not task.done() and not client.process.is_dead:
                self._fault(f"conversation {self.number}: no end after {MOST_SECONDS:.0f} s")
                task.cancel()
                answer.was_cut_off = True
                return
            answer.ended_s = loop.time()
            if client.process.is_dead:
                answer.was_cut_off = True
                return
            if not task.cancelled() and (failure := task.exception()) is not None:
                self._fault(f"conversation {self.number}: {failure!r}")
                raise failure
            if not isinstance(answer.error, SessionBusy):
                return
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _answer(self, answer: Answer, answering: Any, session_id: str) -> None:
        ASKING.set(answer)
        turn = answer.turn
        is_chat = self._conversation.is_chat
        request = AnswerRequest(
            caller=RequestCaller(self._conversation.tenant, answer.usage, 0.0), prompt=turn.new_ids, num_bytes=100,
            session_id=session_id if is_chat else "", num_completions=1 if is_chat else turn.num_completions,
            sampling=turn.params, max_tokens=turn.max_tokens if turn.has_limit else None, ignore_eos=turn.ignores_eos,
            speculation=pb.SpeculationParameters(
                mode=pb.SPECULATION_MODE_PROMPT_LOOKUP if turn.draft_tokens else pb.SPECULATION_MODE_OFF,
                max_draft_tokens=turn.draft_tokens or None,
            ),
        )  # fmt: skip
        try:
            if is_chat:
                deltas = answering.answer(
                    request, lambda record: self._next_prompt(answer, record), lambda record, text: None
                )
                async with aclosing(deltas):
                    async for _, delta in deltas:
                        self._take(answer, 0, delta)
            else:
                self._expect(answer, turn.new_ids)
                deltas = answering.answer(request, lambda record: (0, turn.new_ids), lambda record, text: None)
                async with aclosing(deltas):
                    async for index, delta in deltas:
                        self._take(answer, index, delta)
        except CorollaError as error:
            answer.error = error
            return
        for each in answer.completions:
            if not self._is_whole(answer, each):
                self._fault(f"conversation {self.number}: ended after {each.token_ids}, expected {each.expected}")

    def _is_whole(self, answer: Answer, completion: Completion) -> bool:
        """Whether a completion has all its tokens, or as many as scarce pages allowed where nothing was promised."""
        if self._pages_are_scarce and not answer.turn.has_limit and completion.finish_reason == "length":
            return len(completion.token_ids) >= min(GROWTH_TOKENS, len(completion.expected))
        return completion.token_ids == completion.expected and bool(completion.finish_reason)

    def _next_prompt(self, answer: Answer, record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
        known = list(record.token_log)
        if known not in self._texts:
            self._fault(f"conversation {self.number}: remembered as {known}, which it never was: {self._texts}")
        prompt_ids = [*known, *answer.turn.new_ids]
        self._expect(answer, prompt_ids)
        # Whether the turn is written down, its caller may not learn.
        self._texts.append([*prompt_ids, *answer.completions[0].expected])
        return len(known), prompt_ids

    def _expect(self, answer: Answer, prompt_ids: Sequence[int]) -> None:
        turn = answer.turn
        first = turn.params.seed
        params = [
            turn.params if first is None else replace(turn.params, seed=first + index)
            for index in range(turn.num_completions)
        ]
        texts = [self._model.answer(prompt_ids, turn.max_tokens, each, ignores_eos=turn.ignores_eos) for each in params]
        answer.completions = [Completion(text) for text in texts]

    def _take(self, answer: Answer, index: int, delta: Any) -> None:
        completion = answer.completions[index]
        completion.token_ids.extend(token.token_id for token in delta.tokens)
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason.value
        if completion.session is not None:
            answer.addresses.update(hop.address for hop in completion.session.chain.hops)
        if completion.token_ids != completion.expected[: len(completion.token_ids)]:
            self._fault(f"conversation {self.number}: got {completion.token_ids}, expected {completion.expected}")
        self._delivered(answer, index)
