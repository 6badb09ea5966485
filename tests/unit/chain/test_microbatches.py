"""Steps that share a frame, on a data plane without a server: a frame that cannot be sent fails its own steps only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from corolla.chain.microbatches import Microbatcher
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import HopUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

HOP = common_pb2.Hop(server_id="a", address="127.0.0.1:1", span=common_pb2.BlockSpan(start=0, end=2))


@asynccontextmanager
async def steps_of_one_hop() -> AsyncIterator[tuple[Microbatcher, DataPlane]]:
    plane = DataPlane("fingerprint", TaskGroup())
    microbatcher = Microbatcher([HOP], plane, max_step_tokens=8, step_timeout_s=60.0)
    try:
        yield microbatcher, plane
    finally:
        await microbatcher.close()
        await plane.close()


def row(number: int) -> pb.StepRow:
    return pb.StepRow(session_id=bytes([number]) * 16, epoch=1, position=3, num_tokens=1, num_result_tokens=1)


def unsendable(number: int) -> pb.StepRow:
    """What looks like a row, and is none that a frame could carry."""
    return cast(pb.StepRow, SimpleNamespace(session_id=bytes([number]) * 16, num_tokens=1))


async def test_a_microbatch_that_cannot_be_sent_keeps_no_place_from_the_next() -> None:
    async with steps_of_one_hop() as (microbatcher, plane), asyncio.timeout(30):
        for number in range(3):
            with pytest.raises(TypeError):
                await microbatcher.step(unsendable(number))
        # It leaves at once, and learns that its hop is away.
        with pytest.raises(HopUnavailable):
            await microbatcher.step(row(3))
        assert plane.num_pending == 0


async def test_all_steps_of_a_microbatch_that_cannot_be_sent_learn_of_it() -> None:
    async with steps_of_one_hop() as (microbatcher, _plane), asyncio.timeout(30):

        async def step_both(*rows: pb.StepRow) -> list[type]:
            steps = [microbatcher.step(each) for each in rows]
            return [type(outcome) for outcome in await asyncio.gather(*steps, return_exceptions=True)]

        assert await step_both(row(0), row(1)) == [HopUnavailable, HopUnavailable]
        # From now on each waits for the other.
        assert await step_both(row(0), unsendable(1)) == [TypeError, TypeError]
        with pytest.raises(HopUnavailable):
            await microbatcher.step(row(3))
