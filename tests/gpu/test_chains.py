"""Whole chains on one device: the same tokens over any number of servers, together or alone, and after faults."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.block_server.service import BlockServer
from corolla.compute.base import RowWork
from corolla.sdk.async_client import AsyncClient
from tests.checkpoints import make_tiny_checkpoint
from tests.faulty_runner import plant_fault
from tests.gpu.devices import Device, on_float32, on_half_precision
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Unsplit

NUM_STREAMS = 8
NUM_NEW = 48
CHAINS = {1: ["0:5"], 2: ["0:2", "2:5"], 3: ["0:1", "1:3", "3:5"]}
# A beginning that all share, so that some find its pages, and ends of their own.
PROMPTS = ["the thin man in the inner tent " * 9 + "and ten more " * number for number in range(NUM_STREAMS)]
OPTIONS: dict[str, Any] = {"max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0}
SAMPLED: dict[str, Any] = {**OPTIONS, "temperature": 1.0, "top_p": 0.9, "seed": 5}
# Kernels for GPUs take heads of these sizes.
SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip

Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("chains") / "tiny", config_changes=SHAPE)


def swarm_on(device: Device, folder: Path, model: Path, spans: list[str]) -> Swarm:
    client = {"dtype": device.dtype, "recovery_patience_s": 60.0}
    return Swarm(folder, model, spans, server=device.settings, client=client)


async def together(client: AsyncClient, **options: Any) -> Answers:
    """The answers to all prompts, asked at once."""
    answers = await asyncio.gather(*(client.generate(prompt, **options) for prompt in PROMPTS))
    return [answer.token_ids for answer in answers]


async def alone(client: AsyncClient, **options: Any) -> Answers:
    return [(await client.generate(prompt, **options)).token_ids for prompt in PROMPTS]


@on_half_precision()
async def test_tokens_are_the_same_over_every_chain_together_and_alone(
    tmp_path: Path, model: Path, device: Device
) -> None:
    expected: Answers | None = None
    sampled: Answers | None = None
    for spans in CHAINS.values():
        async with swarm_on(device, tmp_path, model, spans) as swarm, swarm.connect() as client:
            expected = expected or await alone(client, **OPTIONS)
            sampled = sampled or await alone(client, **SAMPLED)
            assert await together(client, **OPTIONS) == expected
            assert await together(client, **SAMPLED) == sampled
    assert len(set(expected or ())) == NUM_STREAMS


async def _kill(swarm: Swarm, victim: BlockServer) -> None:
    await swarm.die(victim)


async def _drain(swarm: Swarm, victim: BlockServer) -> None:
    await victim.stop()


async def _freeze(swarm: Swarm, victim: BlockServer) -> None:
    """The server computes nothing for a while, in the middle of its work."""
    left = [3.0]

    def stand_still(_rows: Sequence[RowWork]) -> None:
        if left:
            time.sleep(left.pop())

    plant_fault(victim.engine.runner, before=stand_still)


@on_half_precision()
@pytest.mark.parametrize("fault", [_kill, _drain, _freeze], ids=["kill", "drain", "freeze"])
@pytest.mark.parametrize("hop", [0, 1], ids=["first hop", "last hop"])
async def test_eight_streams_survive_a_fault_with_the_same_tokens(
    tmp_path: Path, model: Path, device: Device, fault: Callable[[Swarm, BlockServer], Awaitable[None]], hop: int
) -> None:
    spans = CHAINS[2]
    async with swarm_on(device, tmp_path, model, spans) as swarm, swarm.connect() as client:
        expected = await alone(client, **OPTIONS)
        (victim, spare) = swarm.servers[hop], await swarm.add_server(spans[hop])
        answering = asyncio.create_task(together(client, **OPTIONS))
        await until(lambda: any(server.sessions for server in (victim, spare)))
        if len(spare.sessions) > len(victim.sessions):
            victim = spare
        assert not answering.done()
        await fault(swarm, victim)
        assert await answering == expected
        if fault is not _freeze:
            swarm.servers.remove(victim)
        if fault is _kill:
            await victim.stop()


@on_float32()
async def test_float32_gives_the_tokens_of_transformers_on_the_device(
    tmp_path: Path, model: Path, device: Device
) -> None:
    unsplit = Unsplit(model)
    unsplit.model.to(device.name)
    with torch.device(device.name):
        expected = [
            tuple(unsplit.generate(unsplit.encode(prompt), NUM_NEW, ignore_eos=True).token_ids) for prompt in PROMPTS
        ]
    async with swarm_on(device, tmp_path, model, CHAINS[2]) as swarm, swarm.connect() as client:
        assert await together(client, **OPTIONS) == expected
