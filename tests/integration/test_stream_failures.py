"""A stream breaks when a bug ends one of its directions: its sessions continue on other servers at once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corolla.chassis import failpoints
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm


@pytest.fixture
def arm() -> Iterator[Callable[[str], None]]:
    yield lambda given: failpoints.arm({failpoints.VARIABLE: given})
    failpoints.arm({})


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param("peer_reader:100", marks=pytest.mark.full),
        "peer_writer:100",
        # Reads faults only: it fails as it begins.
        pytest.param("relay_reader:1", marks=pytest.mark.full),
        pytest.param("relay_writer:50", marks=pytest.mark.full),
        pytest.param("stream_reader:50", marks=pytest.mark.full),
        "stream_writer:50",
    ],
)
async def test_no_stream_is_half_alive_and_no_token_changes(
    tmp_path: Path, arm: Callable[[str], None], failure: str
) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    # Whoever waits for a lost step learns of it by the stream, or not within this test's time.
    patient = {"step_timeout_s": 600.0, "open_timeout_s": 600.0}
    async with Swarm(tmp_path, model, ["0:2", "2:5"] * 2, client=patient) as swarm, swarm.connect() as client:
        undisturbed = await client.generate("the thin man", max_tokens=32, ignore_eos=True)
        assert undisturbed.usage.recoveries == 0
    arm(f"fail:{failure}")
    async with Swarm(tmp_path, model, ["0:2", "2:5"] * 2, client=patient) as swarm, swarm.connect() as client:
        recoveries = 0
        while not recoveries:
            answer = await client.generate("the thin man", max_tokens=32, ignore_eos=True)
            assert answer.token_ids == undisturbed.token_ids
            recoveries = answer.usage.recoveries
        assert recoveries == 1
        await swarm.until_empty()
