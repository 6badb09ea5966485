"""Packed checkpoints through the whole stack give the tokens of the expanded model, unsplit."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import NoChain
from corolla.cli.placement_table import placement_facts
from tests.integration.swarm import Swarm
from tests.quantized_checkpoints import FORMATS, Made, make_packed_checkpoint, mxfp4
from tests.reference import Sampling, Unsplit
from tests.tiers import quick

CHAINS = (["0:4"], ["0:2", "2:3", "3:4"])
NUM_NEW_TOKENS = 20
STREAMS: tuple[tuple[list[int], Sampling], ...] = (
    ([5, 90, 17, 33], {}),
    (list(range(40, 95)), {"temperature": 0.8, "top_k": 40, "seed": 7}),
)
CASES: dict[str, tuple[str, Any]] = {
    **{name: ("llama", made) for name, made in FORMATS.items()},
    "fp8-experts": ("qwen3_moe", FORMATS["fp8-blocks"]),
    "mxfp4-experts": ("gpt_oss", mxfp4),
}


ON_ONE_HOP = "gptq-act-order"
# Units expand one of each way in which numbers and scales are stored; these are the ways to lay out their parts.
KINDS = ("awq", "bnb-nf4", "ct-fp8-blocks")


@pytest.mark.parametrize("name", quick(sorted(CASES), "gptq-act-order", "fp8-experts", "mxfp4-experts", kinds=KINDS))
async def test_chains_answer_as_the_expanded_model(tmp_path: Path, name: str) -> None:
    family, make = CASES[name]
    made: Made = make()
    packed, expanded = make_packed_checkpoint(family, tmp_path, made)
    unsplit = Unsplit(expanded)
    references = [unsplit.generate(prompt, NUM_NEW_TOKENS, sampling, ignore_eos=True) for prompt, sampling in STREAMS]
    assert not torch.equal(
        references[0].logits[0], Unsplit(tmp_path / "source").generate(STREAMS[0][0], 1, ignore_eos=True).logits[0]
    )
    async with AsyncExitStack() as stack:
        # A chain of one hop goes the same way with all others.
        chains = CHAINS if name == ON_ONE_HOP else CHAINS[-1:]
        swarms = [Swarm(tmp_path, packed, chain, server={"kv_cache_mib": 16}) for chain in chains]
        await asyncio.gather(*(stack.enter_async_context(swarm) for swarm in swarms))
        for swarm in swarms:
            async with swarm.connect() as client:
                answers = await asyncio.gather(
                    *(
                        client.generate(prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **sampling)
                        for prompt, sampling in STREAMS
                    )
                )
            assert [list(answer.token_ids) for answer in answers] == [each.token_ids for each in references]


@pytest.mark.kind
async def test_the_placement_says_what_was_expanded_and_chains_mix_no_formats(tmp_path: Path) -> None:
    """A server of the expanded weights cannot stand in for one of the packed ones, though their numbers are equal."""
    packed, expanded = make_packed_checkpoint("llama", tmp_path, FORMATS["gptq"]())
    same_name = expanded.rename(tmp_path / "elsewhere").joinpath(packed.name)
    shutil.copytree(same_name.parent, same_name, ignore=shutil.ignore_patterns(packed.name))
    async with Swarm(tmp_path, packed, ["0:2", "2:4"], client={"recovery_patience_s": 1.0}) as swarm:
        await swarm.add_server("0:2", model=str(same_name))
        facts = placement_facts(await swarm.placement(packed.name), 0)
        assert sorted(each["dtype"] for each in facts["servers"]) == ["float32", *["float32: gptq expanded"] * 2]
        assert len({each["fingerprint"] for each in facts["servers"]}) == 2
        await swarm.servers.pop(0).stop()
        async with swarm.connect() as client:
            with pytest.raises(NoChain):
                await client.generate("hi", max_tokens=1)
