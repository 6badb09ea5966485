"""Those who ask: each conversation turn by turn, against what one machine would have answered."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

from corolla.chassis.errors import CorollaError, SessionBusy
from corolla.client.chain.account import Recovered
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.opener import ChainOpener
from corolla.client.chain.reservations import OpenOptions
from corolla.client.chain.session import ChainSession
from corolla.client.generation.caller import Caller as RequestCaller
from corolla.client.generation.options import AnswerOptions
from corolla.client.generation.speculator import SpeculationMode, SpeculationOptions
from corolla.client.generation.usage import Usage
from corolla.v1 import router_pb2
from tests.simulation.scenario import Conversation, Turn
from tests.simulation.toy_model import ToyModel

MOST_SECONDS: Final = 60.0
"""Of one request."""

_RETRIES: Final = 40
_RETRY_INTERVAL_S: Final = 1.0


@dataclass(eq=False)
class Answer:
    """What became of one turn.

    Attributes:
        conversation: its number.
        expected: the tokens of one machine; None until the prompt is known.
        session: of its hops, while it is open.
        addresses: of all hops that it used.
        was_cut_off: the caller left, or the client service died.
    """

    conversation: int
    turn: Turn
    is_chat: bool
    is_first: bool
    expected: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: CorollaError | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    usage: Usage = field(default_factory=lambda: Usage(started_s=0.0))
    session: ChainSession | None = None
    addresses: set[str] = field(default_factory=set)
    was_cut_off: bool = False
    task: "asyncio.Task[None] | None" = None


ASKING: ContextVar[Answer | None] = ContextVar("asking", default=None)


class WatchedOpener(ChainOpener):
    """The real one, which lets us see what is open."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open_sessions: dict[bytes, ChainSession] = {}

    @asynccontextmanager
    async def open(
        self,
        identity: SessionIdentity,
        options: OpenOptions,
        on_recovered: Callable[[Recovered], None],
        until_s: float = math.inf,
    ) -> AsyncIterator[ChainSession]:
        answer = ASKING.get()
        async with super().open(identity, options, on_recovered, until_s) as session:
            self.open_sessions[identity.session_id] = session
            if answer is not None:
                answer.session = session
                answer.addresses.update(hop.address for hop in session.chain.hops)
            try:
                yield session
            finally:
                self.open_sessions.pop(identity.session_id, None)
                if answer is not None:
                    answer.session = None


class Caller:
    """Holds one conversation.

    Args:
        client: the client service of a number, as it is now.
        fault: is told what must not be.
        delivered: is told of each token that came.
        ended: is told of each answer that came to its end.
        may_guess: not where old steps come again, which no transport does: wrong guesses in them would count.
    """

    def __init__(
        self,
        number: int,
        conversation: Conversation,
        model: ToyModel,
        client: Callable[[int], Any],
        fault: Callable[[str], None],
        delivered: Callable[[Answer], None],
        ended: Callable[[Answer], None],
        *,
        may_guess: bool,
    ) -> None:
        self.number = number
        self.answers: list[Answer] = []
        self._conversation = conversation
        self._model = model
        self._client = client
        self._fault = fault
        self._delivered = delivered
        self._ended = ended
        # Every text that the conversation had after a turn that may have been written down.
        self._texts: list[list[int]] = [[]]
        self._has_left = False
        self._may_guess = may_guess

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
        turn = answer.turn if self._may_guess else replace(answer.turn, guesses=0)
        caller = RequestCaller(self._conversation.tenant, 100, answer.usage)
        options = AnswerOptions(
            sampling=turn.params, max_tokens=turn.max_tokens, stop_sequences=(), ignore_eos=turn.ignores_eos,
            time_limit_s=None,
            speculation=SpeculationOptions(
                SpeculationMode.PROMPT_LOOKUP if turn.guesses else SpeculationMode.OFF, turn.guesses or None
            ),
        )  # fmt: skip
        try:
            if self._conversation.is_chat:
                deltas = answering.continue_session(
                    caller, session_id, lambda record: self._next_prompt(answer, record), lambda record, text: None,
                    options,
                )  # fmt: skip
                async with aclosing(deltas):
                    async for delta in deltas:
                        self._take(answer, delta)
            else:
                self._expect(answer, turn.new_ids)
                deltas = answering.complete(caller, lambda: turn.new_ids, options, 1)
                async with aclosing(deltas):
                    async for _, delta in deltas:
                        self._take(answer, delta)
        except CorollaError as error:
            answer.error = error
            return
        if answer.token_ids != answer.expected or not answer.finish_reason:
            self._fault(f"conversation {self.number}: ended after {answer.token_ids}, expected {answer.expected}")

    def _next_prompt(self, answer: Answer, record: router_pb2.SessionRecord) -> tuple[int, Sequence[int]]:
        known = list(record.token_log)
        if known not in self._texts:
            self._fault(f"conversation {self.number}: remembered as {known}, which it never was: {self._texts}")
        prompt_ids = [*known, *answer.turn.new_ids]
        self._expect(answer, prompt_ids)
        # Whether the turn is written down, its caller may not learn.
        self._texts.append([*prompt_ids, *(answer.expected or [])])
        return len(known), prompt_ids

    def _expect(self, answer: Answer, prompt_ids: Sequence[int]) -> None:
        turn = answer.turn
        answer.token_ids = []
        answer.expected = self._model.answer(prompt_ids, turn.max_tokens, turn.params, ignores_eos=turn.ignores_eos)

    def _take(self, answer: Answer, delta: Any) -> None:
        answer.token_ids.append(delta.token.token_id)
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason.value
        if answer.session is not None:
            answer.addresses.update(hop.address for hop in answer.session.chain.hops)
        expected = answer.expected or []
        if answer.token_ids != expected[: len(answer.token_ids)]:
            self._fault(f"conversation {self.number}: got {answer.token_ids}, expected {expected}")
        self._delivered(answer)
