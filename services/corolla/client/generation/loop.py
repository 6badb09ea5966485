"""The loop that owns every token: prompt in, then step and sample until the answer ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import torch

from corolla.chain.session import ChainSession
from corolla.client.generation.answer import Answer, Delta
from corolla.decoding.sampling import Sampler
from corolla.decoding.speculator import Speculator


class AnswerSampler:
    """Chooses an answer's tokens; the loop leaves it alone while a step is under way.

    Args:
        started_s: when the request began, by `time.monotonic()`.
    """

    def __init__(self, sampler: Sampler, answer: Answer, started_s: float) -> None:
        self.draft_tokens: Sequence[int] = ()
        self._sampler = sampler
        self._answer = answer
        self._started_s = started_s

    def sample(self, logits: torch.Tensor) -> list[int]:
        """Tokens from `[1 + len(draft_tokens), V]` logits, up to the first that was not drafted or ends the answer.

        So the random stream gives just the numbers that it gives without draft tokens.
        """
        token_ids: list[int] = []
        for index, row in enumerate(logits):
            token = self._sampler.sample(row)
            token_ids.append(token.token_id)
            self._answer.accept(token, time.monotonic() - self._started_s)
            is_right = index < len(self.draft_tokens) and token.token_id == self.draft_tokens[index]
            if not (self.wants_more and is_right):
                break
        return token_ids

    @property
    def wants_more(self) -> bool:
        return self._answer.finish_reason is None


Prefill = Callable[[AnswerSampler], Awaitable[list[int]]]
"""Has the chain process what it lacks of the prompt; gives what the sampler chose behind it."""


class SharedPrompt:
    """A prompt of several answers: the first session processes it, and `num_forks` others fork before it continues."""

    def __init__(self, num_forks: int) -> None:
        self.source: asyncio.Future[ChainSession] = asyncio.get_running_loop().create_future()
        self._processed = asyncio.Event()
        self._num_forks_left = num_forks
        self._forked = asyncio.Event()

    async def prefill(self, session: ChainSession, new_ids: Sequence[int], sampler: AnswerSampler) -> list[int]:
        """Processes the prompt in the first session, which waits until the others have forked."""
        token_ids = await session.prefill(new_ids, sampler)
        self._processed.set()
        if self._num_forks_left > 0:
            await self._forked.wait()
        return token_ids

    async def fork(self, session: ChainSession, prompt_ids: Sequence[int], sampler: AnswerSampler) -> list[int]:
        """Forks one of the others once the prompt is processed."""
        await self._processed.wait()
        try:
            return await session.fork_from(await self.source, prompt_ids, sampler)
        finally:
            self.release()

    def release(self) -> None:
        """One of the others has forked, or needs no fork."""
        self._num_forks_left -= 1
        if self._num_forks_left <= 0:
            self._forked.set()


async def generate(
    session: ChainSession,
    sampler: AnswerSampler,
    answer: Answer,
    prefill: Prefill,
    speculator: Speculator | None = None,
) -> AsyncGenerator[Delta, None]:
    """Generates one answer token by token. While a step's tokens become text, the next step is already under way.

    With a speculator, a step may carry draft tokens. Every token is the sampler's own choice from the chain's logits,
    in order and with the same random stream; a draft token only decides whether the logits after it are there already.
    So the tokens are those of plain decoding, seeded sampling included. (That is speculative sampling, Leviathan et
    al. 2023, with target and draft drawn by the same random numbers.)
    """
    if speculator is not None:
        speculator.start()
    try:
        token_ids = await prefill(sampler)
        while sampler.wants_more:
            step = asyncio.create_task(_step(session, sampler, token_ids, answer.num_tokens_left, speculator))
            try:
                await asyncio.sleep(0)  # the step is sent before the text is decoded
                for delta in answer.deltas():
                    yield delta
                token_ids = await step
            finally:
                step.cancel()
        for delta in answer.deltas():
            yield delta
    finally:
        if speculator is not None:
            speculator.close()


async def _step(
    session: ChainSession,
    sampler: AnswerSampler,
    token_ids: Sequence[int],
    num_tokens_left: int,
    speculator: Speculator | None,
) -> list[int]:
    if speculator is None:
        return await session.decode(token_ids[-1], (), sampler)
    # The answer's last token needs no step, so a draft token at it is of no use.
    draft_tokens = await speculator.draft(token_ids, min(num_tokens_left - 1, session.max_draft_tokens))
    sampler.draft_tokens = draft_tokens
    chosen = await session.decode(token_ids[-1], draft_tokens, sampler)
    speculator.observe(len(draft_tokens), len(chosen) - 1)
    return chosen
