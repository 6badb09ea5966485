"""A stream breaks when a bug shows in what it brings: its sessions continue on other servers at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from corolla.client.service import ClientBounds
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm

NUM_FRAMES = 20


def failing_once(kind: type, num_frames: int) -> Callable[[str, Frame], Frame]:
    """A bug that shows when the nth frame of a kind comes."""
    num_left = num_frames

    def hook(address: str, frame: Frame) -> Frame:
        nonlocal num_left
        num_left -= isinstance(frame.control, kind)
        if num_left == 0:
            num_left = -1
            raise ValueError("a bug")
        return frame

    return hook


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("where", ["client service", "block server"])
async def test_no_stream_is_half_alive_and_no_token_changes(tmp_path: Path, where: str, is_encrypted: bool) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    # A client that waits for a lost step learns of it by the stream, or not within this test's time.
    patient, bounds = {"step_timeout_s": 600.0}, ClientBounds(open_timeout_s=600.0)
    swarm = Swarm(tmp_path, model, ["0:2", "2:5"] * 2, client=patient, bounds=bounds, is_encrypted=is_encrypted)
    async with swarm, swarm.connect() as client:
        undisturbed = await client.generate("the thin man", max_tokens=32, ignore_eos=True)
        assert undisturbed.usage.recoveries == 0
        if where == "client service":
            swarm.wires_of(swarm.clients[0]).on_received = failing_once(pb.Result, NUM_FRAMES)
        else:
            hook = failing_once(pb.Step, NUM_FRAMES)
            for server in swarm.servers:
                swarm.wires_of(server).on_taken = hook
        recoveries = 0
        while not recoveries:
            answer = await client.generate("the thin man", max_tokens=32, ignore_eos=True)
            assert answer.token_ids == undisturbed.token_ids
            recoveries = answer.usage.recoveries
        assert recoveries == 1
        await swarm.until_empty()
