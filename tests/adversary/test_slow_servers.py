"""A block server that says it is fast, and is not: client services notice, and the router hears of it."""

import time
from pathlib import Path

from corolla.v1 import blocks_pb2
from corolla.wire.frames import Frame
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm
from tests.integration.waiting import until


async def test_a_chain_that_is_far_slower_than_its_servers_say_makes_them_doubtful(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:2", "2:5"]) as swarm, swarm.connect() as client:

        async def num_doubted() -> int:
            return sum(each.doubted for each in (await swarm.placement()).servers)

        def sleep(address: str, frame: Frame) -> Frame:
            if isinstance(frame.control, blocks_pb2.Step):
                time.sleep(0.5)
            return frame

        swarm.wires_of(swarm.servers[1]).on_taken = sleep
        await client.generate([1, 2, 3], max_tokens=20, ignore_eos=True)

        async def are_doubted() -> bool:
            return await num_doubted() == 2

        await until(are_doubted, 60)
