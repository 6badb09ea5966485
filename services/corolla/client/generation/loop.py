"""The loop that owns every token: prompt in, then step, sample, stop or go on."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from corolla.client.chain.session import ChainSession
from corolla.client.compute import ComputeThread
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.sampling import Sampler


async def generate(
    session: ChainSession,
    compute: ComputeThread,
    sampler: Sampler,
    answer: Answer,
    new_prompt_ids: Sequence[int],
    started_s: float,
) -> AsyncGenerator[Delta, None]:
    """Generates one answer token by token.

    While the caller handles a token, the step that yields the next one is already under way.

    Args:
        session: at the position where `new_prompt_ids` begin.
        new_prompt_ids: what the chain has not processed yet; at least one.
        started_s: when the request began, by `time.monotonic()`.
    """
    logits = await session.prefill(new_prompt_ids)
    while True:
        token = await compute.run(sampler.sample, logits)
        delta = answer.push(token, time.monotonic() - started_s)
        if delta.finish_reason is not None:
            yield delta
            return
        step = asyncio.create_task(session.decode(token.token_id))
        try:
            yield delta
            logits = await step
        finally:
            step.cancel()
