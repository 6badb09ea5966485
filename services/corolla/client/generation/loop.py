"""The loop that generates an answer: it processes the prompt, then takes steps until the answer ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from corolla.chain.prompt_readout import PromptReadout
from corolla.chain.session import ChainSession
from corolla.client.generation.answer import Answer, Delta
from corolla.decoding.parameters import SampledToken

CountDrafts = Callable[[int, int], None]
"""Takes the number of draft tokens that a step checked, and how many of them were right."""


class AnswerReader:
    """Reads an answer's tokens as they come from the chain.

    Args:
        started_s: when the request began, by `time.monotonic()`.
    """

    def __init__(self, answer: Answer, started_s: float) -> None:
        self._answer = answer
        self._started_s = started_s

    def read(self, token: SampledToken) -> bool:
        """Adds the next token to the answer. Returns whether the answer continues."""
        self._answer.accept(token, time.monotonic() - self._started_s)
        return self.wants_more

    @property
    def wants_more(self) -> bool:
        return self._answer.finish_reason is None


Grow = Callable[[ChainSession], Awaitable[bool]]
"""Gives a session that is full room for more tokens. Returns False if there is none."""

Prefill = Callable[[AnswerReader], Awaitable[None]]
"""Processes the rest of the prompt on the chain; the reader gets the token that follows."""


class SharedPrompt:
    """A prompt with several answers: one session processes it, and waits until `num_forks` others have forked it."""

    def __init__(self, num_forks: int) -> None:
        self.source: asyncio.Future[ChainSession] = asyncio.get_running_loop().create_future()
        self._processed = asyncio.Event()
        self._num_forks_left = num_forks
        self._forked = asyncio.Event()

    async def prefill(
        self, session: ChainSession, new_ids: Sequence[int], readout: PromptReadout | None, reader: AnswerReader
    ) -> None:
        """Processes the prompt in the first session, which then waits until the other sessions have forked it."""
        await session.prefill(new_ids, reader, waits=self._num_forks_left > 0, readout=readout)
        self._processed.set()
        if self._num_forks_left > 0:
            await self._forked.wait()

    async def fork(self, session: ChainSession, prompt_ids: Sequence[int], reader: AnswerReader) -> None:
        """Forks the first session into another one when the prompt is processed."""
        await self._processed.wait()
        try:
            await session.fork_from(await self.source, prompt_ids, reader)
        finally:
            self.release()

    def release(self) -> None:
        """Records that one of the other sessions has forked, or needs no fork."""
        self._num_forks_left -= 1
        if self._num_forks_left <= 0:
            self._forked.set()


async def generate(
    session: ChainSession,
    answer: Answer,
    reader: AnswerReader,
    prefill: Prefill,
    grow: Grow,
    count_drafts: CountDrafts,
) -> AsyncGenerator[Sequence[Delta], None]:
    """Generates one answer token by token. While tokens are decoded to text, the hops compute the next ones.

    Tokens that arrive while the caller handles the last ones are yielded together: a slow caller gets fewer messages.

    A step may carry draft tokens. Every token is the choice of the session's sampler from the chain's logits, in order
    and with the same random numbers; a draft token never changes a choice. If it proves right, the logits for the next
    choice are already computed. So the tokens are those of plain decoding, seeded sampling included. (That is
    speculative sampling, Leviathan et al. 2023, with target and draft drawn by the same random numbers.)
    """
    await prefill(reader)
    while reader.wants_more:
        yield answer.deltas()
        if session.is_full and not await grow(session):
            answer.cut_off()
            break
        await _read_on(session, reader, count_drafts)
    yield answer.deltas()


async def _read_on(session: ChainSession, reader: AnswerReader, count_drafts: CountDrafts) -> None:
    """Reads the next step's tokens, and all further ones that have arrived."""
    while True:
        num_drafted, num_taken = await session.decode(reader)
        if num_drafted:
            count_drafts(num_drafted, num_taken - 1)
        if not (reader.wants_more and session.has_unread_tokens):
            return
