"""Steps that share a frame, on a data plane without a server: a frame that cannot be sent fails its own steps only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from prometheus_client import Counter

from corolla.chain.microbatches import Microbatcher
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import HopUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.decoding.compute_thread import ComputeThread
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from tests.checkpoints import make_tiny_checkpoint

HOP = common_pb2.Hop(server_id="a", address="127.0.0.1:1", span=common_pb2.BlockSpan(start=0, end=2))


class Unasked:
    """Chooses nothing, since nothing comes back."""

    wants_more = True

    def sample(self, logits: torch.Tensor) -> list[int]:
        raise NotImplementedError


@asynccontextmanager
async def steps_of_one_hop(folder: Path) -> AsyncIterator[tuple[Microbatcher, DataPlane]]:
    compute = ComputeThread(Counter("busy_seconds", "of the thread", registry=None))
    plane = DataPlane("fingerprint", TaskGroup())
    edges = load_edges(
        Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", folder / "tiny"))), dtype=torch.float32
    )
    microbatcher = Microbatcher([HOP], plane, edges, compute, max_step_tokens=8, step_timeout_s=60.0)
    try:
        yield microbatcher, plane
    finally:
        await microbatcher.close()
        await plane.close()
        compute.close()


def row(number: int) -> pb.StepRow:
    return pb.StepRow(session_id=bytes([number]) * 16, epoch=1, position=3, num_tokens=1, num_result_tokens=1)


async def test_a_microbatch_that_cannot_be_sent_keeps_no_place_from_the_next(tmp_path: Path) -> None:
    async with steps_of_one_hop(tmp_path) as (microbatcher, plane), asyncio.timeout(30):
        for number in range(3):
            with pytest.raises(KeyError):  # no frame carries this dtype
                await microbatcher.step(row(number), torch.zeros(1, 16, dtype=torch.int8), Unasked())
        # It leaves at once, and learns that its hop is away.
        with pytest.raises(HopUnavailable):
            await microbatcher.step(row(3), torch.zeros(1, 16), Unasked())
        assert plane.num_pending == 0


async def test_all_steps_of_a_microbatch_that_cannot_be_sent_learn_of_it(tmp_path: Path) -> None:
    async with steps_of_one_hop(tmp_path) as (microbatcher, _plane), asyncio.timeout(30):

        async def step_both(*widths: int) -> list[type]:
            steps = [
                microbatcher.step(row(number), torch.zeros(1, width), Unasked()) for number, width in enumerate(widths)
            ]
            return [type(outcome) for outcome in await asyncio.gather(*steps, return_exceptions=True)]

        assert await step_both(16, 16) == [HopUnavailable, HopUnavailable]
        # From now on each waits for the other. States of two widths make no tensor.
        assert await step_both(16, 17) == [RuntimeError, RuntimeError]
        with pytest.raises(HopUnavailable):
            await microbatcher.step(row(3), torch.zeros(1, 16), Unasked())
