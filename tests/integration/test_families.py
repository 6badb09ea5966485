"""Every family through the whole stack gives the unsplit model's tokens."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import FinishReason
from tests.checkpoints import make_tiny_checkpoint
from tests.families import family_cases
from tests.integration.swarm import Swarm
from tests.published import NUM_NEW_TOKENS as NUM_PUBLISHED_TOKENS
from tests.published import PUBLISHED, Row
from tests.reference import Reference, Sampling, Unsplit

# Cut behind a first block and in the middle: kinds of blocks alternate.
CHAINS = (["0:5"], ["0:1", "1:3", "3:5"])
CHUNK_TOKENS = 16
NUM_NEW_TOKENS = 16
PAGE_TOKENS = 8

# Prompts shorter than a chunk, of whole chunks, and beyond them; all but the first go past the sliding windows.
STREAMS: tuple[tuple[int, Sampling], ...] = (
    (1, {}),
    (CHUNK_TOKENS - 3, {"temperature": 1.0, "seed": 3}),
    (2 * CHUNK_TOKENS, {}),
    (3 * CHUNK_TOKENS + 5, {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}),
    (70, {}),
)


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    drawn: list[int] = torch.randint(4, 256, (num_tokens,), generator=generator).tolist()
    return drawn


async def assert_streams_equal(
    client: AsyncClient, references: Sequence[Reference], chain: Sequence[str], *, is_known: bool
) -> None:
    """All streams at once, their beginnings held by pages or not; each as the unsplit model answers it alone."""
    answers = await asyncio.gather(
        *(
            client.generate(prompt_of(num_tokens), max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **sampling)
            for num_tokens, sampling in STREAMS
        )
    )
    for (num_tokens, sampling), answer, reference in zip(STREAMS, answers, references, strict=True):
        where = f"{num_tokens} prompt tokens, {sampling or 'greedy'}, chain {chain}"
        assert list(answer.token_ids) == reference.token_ids, where
        assert answer.finish_reason is FinishReason.LENGTH, where
        num_whole = (num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert answer.usage.cached_tokens == (num_whole if is_known else 0), where


# Experts, recurrent states and the like are those of `tests.families.SHAPES`; these differ in how a chain carries them.
CARRIED = ("bloom", "deepseek_v3", "gemma2", "qwen3_next")


@pytest.mark.parametrize("family", family_cases(kept=CARRIED, within_blocks=False))
async def test_chains_answer_as_the_unsplit_model(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family)
    unsplit = Unsplit(folder)
    references = [
        unsplit.generate(prompt_of(num_tokens), NUM_NEW_TOKENS, sampling, ignore_eos=True)
        for num_tokens, sampling in STREAMS
    ]
    assert len({tuple(reference.token_ids) for reference in references}) == len(STREAMS)
    # A chain of one hop goes the same way with all others.
    chains = CHAINS if family in CARRIED else CHAINS[-1:]
    async with AsyncExitStack() as stack:
        swarms = [
            Swarm(
                tmp_path,
                folder,
                chain,
                client={"prefill_chunk_tokens": CHUNK_TOKENS},
                server={"kv_cache_mib": 16, "page_tokens": PAGE_TOKENS},
            )
            for chain in chains
        ]
        await asyncio.gather(*(stack.enter_async_context(swarm) for swarm in swarms))
        for swarm, chain in zip(swarms, chains, strict=True):
            async with swarm.connect() as client:
                for is_known in (False, True) if chain is CHAINS[-1] else (False,):
                    await assert_streams_equal(client, references, chain, is_known=is_known)
            await swarm.until_empty()


@pytest.mark.full
async def test_a_model_that_sees_answers_texts_as_transformers_does(tmp_path: Path) -> None:
    row = Row(next(each for each in PUBLISHED if each.name == "Qwen3.5-397B-A17B"), tmp_path)
    async with Swarm(tmp_path, row.folder, CHAINS[-1]) as swarm, swarm.connect() as client:
        answer = await client.generate(row.prompt, max_tokens=NUM_PUBLISHED_TOKENS, ignore_eos=True)
        assert list(answer.token_ids) == row.unsplit()
        await swarm.until_empty()
