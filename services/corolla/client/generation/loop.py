"""The loop that owns every token: prompt in, then step, sample, stop or go on."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

import torch

from corolla.client.chain.session import ChainSession
from corolla.client.compute import ComputeThread
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.sampling import Sampler
from corolla.client.generation.speculator import Speculator


async def generate(
    session: ChainSession,
    compute: ComputeThread,
    sampler: Sampler,
    answer: Answer,
    new_prompt_ids: Sequence[int],
    started_s: float,
    speculator: Speculator | None = None,
) -> AsyncGenerator[Delta, None]:
    """Generates one answer token by token.

    While the caller handles the tokens of a step, the next one is already under way.

    With a speculator, a step may carry guesses at the tokens to come. Every token is nevertheless the sampler's own
    choice from the chain's logits, in order and with the same random stream; a guess only decides whether the logits
    after it are there already. So the tokens are those of plain decoding, seeded sampling included. (That is
    speculative sampling, Leviathan et al. 2023, with target and draft drawn by the same random numbers.)

    Args:
        session: at the position where `new_prompt_ids` begin.
        new_prompt_ids: what the chain has not processed yet; at least one.
        started_s: when the request began, by `time.monotonic()`.
        speculator: None for one token at a time.
    """
    if speculator is not None:
        speculator.begin()
    try:
        logits = (await session.prefill(new_prompt_ids)).unsqueeze(0)
        guesses: list[int] = []
        while True:
            deltas = await _read(compute, sampler, answer, logits, guesses, started_s)
            session.accept(len(deltas) - 1)
            if speculator is not None:
                speculator.learn(len(guesses), len(deltas) - 1)
            if deltas[-1].finish_reason is not None:
                for delta in deltas:
                    yield delta
                return
            token_ids = [delta.token.token_id for delta in deltas]
            step = asyncio.create_task(_step(session, token_ids, answer.num_tokens_left, speculator))
            try:
                for delta in deltas:
                    yield delta
                logits, guesses = await step
            finally:
                step.cancel()
    finally:
        if speculator is not None:
            speculator.close()


async def _read(
    compute: ComputeThread,
    sampler: Sampler,
    answer: Answer,
    logits: torch.Tensor,
    guesses: Sequence[int],
    started_s: float,
) -> list[Delta]:
    """Takes tokens from `[1 + len(guesses), V]` logits, up to the first that was not guessed or ends the answer."""
    deltas: list[Delta] = []
    for index, row in enumerate(logits):
        token = await compute.run(sampler.sample, row)
        deltas.append(answer.push(token, time.monotonic() - started_s))
        if deltas[-1].finish_reason is not None:
            break
        if index < len(guesses) and token.token_id != guesses[index]:
            break
    return deltas


async def _step(
    session: ChainSession, token_ids: Sequence[int], num_tokens_left: int, speculator: Speculator | None
) -> tuple[torch.Tensor, list[int]]:
    if speculator is None:
        return (await session.decode(token_ids[-1])).unsqueeze(0), []
    # The answer's last token needs no step, so a guess at it is of no use.
    guesses = await speculator.draft(token_ids, min(num_tokens_left - 1, session.max_guesses))
    if guesses:
        logits = await session.verify(token_ids[-1], guesses)
    else:
        logits = (await session.decode(token_ids[-1])).unsqueeze(0)
    speculator.stepped()
    return logits, guesses
