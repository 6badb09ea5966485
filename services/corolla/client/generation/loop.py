"""The loop that owns every token: prompt in, then step, sample, stop or go on."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from corolla.client.chain.session import ChainSession
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.reader import AnswerReader
from corolla.client.generation.sampling import Sampler
from corolla.client.generation.speculator import Speculator


async def generate(
    session: ChainSession,
    sampler: Sampler,
    answer: Answer,
    new_prompt_ids: Sequence[int],
    started_s: float,
    speculator: Speculator | None = None,
) -> AsyncGenerator[Delta, None]:
    """Generates one answer token by token.

    While the tokens of a step become text and the caller handles them, the next step is already under way.

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
    reader = AnswerReader(sampler, answer, started_s)
    if speculator is not None:
        speculator.begin()
    try:
        token_ids = await session.prefill(new_prompt_ids, reader)
        while reader.goes_on:
            step = asyncio.create_task(_step(session, reader, token_ids, answer.num_tokens_left, speculator))
            try:
                await asyncio.sleep(0)  # lets it leave; nothing can have come back when the text is looked at
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
    reader: AnswerReader,
    token_ids: Sequence[int],
    num_tokens_left: int,
    speculator: Speculator | None,
) -> list[int]:
    if speculator is None:
        return await session.decode(token_ids[-1], (), reader)
    # The answer's last token needs no step, so a guess at it is of no use.
    guesses = await speculator.draft(token_ids, min(num_tokens_left - 1, session.max_guesses))
    reader.guesses = guesses
    chosen = await session.decode(token_ids[-1], guesses, reader)
    speculator.learn(len(guesses), len(chosen) - 1)
    return chosen
