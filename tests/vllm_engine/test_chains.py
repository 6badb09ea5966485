"""Chains of block servers that compute with vLLM answer as the unsplit model of transformers, also beside others."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server.engines.vllm_layers import VLLM_FAMILIES
from corolla.sdk.async_client import AsyncClient
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm
from tests.reference import Reference, Sampling, Unsplit
from tests.vllm_engine.checkpoints import make_checkpoint

pytestmark = pytest.mark.vllm

ENGINE = {"engine": "vllm", "kv_cache_mib": 16, "page_tokens": 8}
CHAINS = (["0:5"], ["0:1", "1:5"], ["0:2", "2:3", "3:5"])
NUM_NEW_TOKENS = 24
STREAMS: tuple[tuple[int, Sampling], ...] = (
    (1, {}),
    (13, {"temperature": 1.0, "seed": 3}),
    (53, {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4}),
    (70, {}),
)


def prompt_of(num_tokens: int) -> list[int]:
    return [4 + 7 * number % 200 for number in range(num_tokens)]


def references_of(folder: Path) -> list[Reference]:
    unsplit = Unsplit(folder)
    return [
        unsplit.generate(prompt_of(num_tokens), NUM_NEW_TOKENS, sampling, ignore_eos=True)
        for num_tokens, sampling in STREAMS
    ]


async def assert_equal(client: AsyncClient, references: list[Reference], **options: Any) -> None:
    """All streams at once, each as the unsplit model answers it alone."""
    asked = [
        client.generate(prompt_of(num_tokens), max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **sampling, **options)
        for num_tokens, sampling in STREAMS
    ]
    answers = await asyncio.gather(*asked)
    assert [list(answer.token_ids) for answer in answers] == [reference.token_ids for reference in references]


@pytest.mark.parametrize("chain", CHAINS, ids=len)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
async def test_chains_answer_as_the_unsplit_model(tmp_path: Path, family: str, chain: list[str]) -> None:
    folder = make_checkpoint(family, tmp_path / family)
    references = references_of(folder)
    async with Swarm(tmp_path, folder, chain, server=ENGINE, client={"prefill_chunk_tokens": 16}) as swarm:
        placement = await swarm.placement(family)
        assert {each.server.dtype for each in placement.servers} == {"float32, vllm"}
        async with swarm.connect() as client:
            for options in ({}, {"speculation": "prompt_lookup"}):
                await assert_equal(client, references, **options)
            forks: dict[str, Any] = {"n": 3, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            several = await client.generate(prompt_of(53), **forks, seed=5)
            unsplit = Unsplit(folder)
            assert [list(each.token_ids) for each in several.completions] == [
                unsplit.generate(prompt_of(53), 8, {"temperature": 1.0, "seed": 5 + index}, ignore_eos=True).token_ids
                for index in range(3)
            ]
        await swarm.until_empty()


@pytest.mark.parametrize("family", sorted(VLLM_FAMILIES))
async def test_a_chain_of_every_family_answers_as_the_unsplit_model(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(family, tmp_path / family)
    references = references_of(folder)
    async with (
        Swarm(tmp_path, folder, ["0:2", "2:5"], server=ENGINE, client={"prefill_chunk_tokens": 16}) as swarm,
        swarm.connect() as client,
    ):
        await assert_equal(client, references)


@pytest.mark.parametrize("ends", ["drained", "crashed"])
async def test_one_engine_takes_over_from_the_other(tmp_path: Path, ends: str) -> None:
    """Both keep the same keys and values in the same pages: a session goes on where it was, or is replayed."""
    folder = make_tiny_checkpoint("llama", tmp_path / "tiny", config_changes={"max_position_embeddings": 4096})
    prompt, num_tokens, sampling = prompt_of(40), 600, Sampling(temperature=0.9, seed=8)
    expected = Unsplit(folder).generate(prompt, num_tokens, sampling, ignore_eos=True).token_ids
    async with Swarm(tmp_path, folder, ["0:2", "2:5"], server=ENGINE) as swarm:
        leaver = swarm.servers[1]
        async with swarm.connect() as client:
            stream = client.stream(prompt, max_tokens=num_tokens, ignore_eos=True, **sampling)
            received = list((await anext(stream)).token_ids)
            heir = await swarm.add_server("2:5", engine="transformers")
            await (leaver.stop() if ends == "drained" else swarm.crash(leaver))
            received += [token_id async for chunk in stream for token_id in chunk.token_ids]
            assert received == expected
            formats = {each.server.address: each.server.dtype for each in (await swarm.placement()).servers}
            assert formats[heir.address] == "float32"
        if ends == "drained":
            swarm.servers.remove(leaver)
