"""A real model with a vocabulary of 262,144 tokens and windows of 512, served by `corolla up`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from corolla import Client
from corolla.cli.control_channel import router_stub
from corolla.compute.speed import measure_speed
from corolla.models.checkpoint import Checkpoint
from corolla.router.placement import HostedSpan, WeightMemory, choose_span
from corolla.v1 import router_pb2
from corolla.wire.span import Span, gaps
from tests.gemma import gemma_checkpoint, unpacked_gemma
from tests.golden import SAFE_GAP
from tests.integration.running_up import RunningUp
from tests.reference import Sampling, Unsplit, smallest_gap

pytestmark = [pytest.mark.full, pytest.mark.model]

NUM_NEW_TOKENS = 24
SENTENCE = "The lighthouse keeper wrote down the name of every ship that passed the cape that year. "
CASES: dict[str, tuple[str, Sampling]] = {
    "greedy": ("The three largest cities of France are", {}),
    "sampled": ("A short poem about the sea:", {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 7}),
    "penalties": (
        "Reasons to plant a tree:",
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 3},
    ),
    "beyond the window": (SENTENCE * 40 + "In the end,", {}),
}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[RunningUp]:
    running = RunningUp(tmp_path, "--model", str(gemma_checkpoint()), "--servers", "2")
    yield running
    assert running.end() == 0


def test_it_answers_as_the_unsplit_model_and_the_server_of_the_head_has_the_fewest_blocks(up: RunningUp) -> None:
    unsplit = Unsplit(unpacked_gemma())
    with router_stub(up.addresses["router"]) as stub:
        placement = stub.GetPlacement(router_pb2.GetPlacementRequest())
    assert sorted(str(Span.from_message(each.span)) for each in placement.servers) == ["0:17", "17:18"]
    with Client(up.addresses["client"]) as client:
        for name, (text, sampling) in CASES.items():
            prompt_ids = unsplit.encode(text)
            assert (len(prompt_ids) > 512) == (name == "beyond the window")
            expected = unsplit.generate(prompt_ids, NUM_NEW_TOKENS, sampling)
            assert smallest_gap(expected, sampling) > SAFE_GAP, "a tie proves nothing; take another prompt"
            answer = client.generate(text, max_tokens=NUM_NEW_TOKENS, **sampling)
            assert list(answer.token_ids) == expected.token_ids, name


def test_auto_gives_the_server_of_the_head_fewer_blocks() -> None:
    checkpoint = Checkpoint.from_pretrained(str(gemma_checkpoint()))
    speed = measure_speed(checkpoint, torch.float32, "cpu")
    first = choose_span([], 18, 17, 1.0, speed.head_blocks)
    second = choose_span([HostedSpan(first, 1.0, speed.head_blocks)], 18, 17, 1.0, speed.head_blocks)
    assert (str(first), str(second)) == ("0:17", "17:18")
    memory = WeightMemory((760 << 20) / speed.block_bytes, speed.head_blocks, checkpoint.has_tied_edges)
    servers: list[HostedSpan] = []
    for _ in range(3):
        span = choose_span(servers, 18, 18, 1.0, speed.head_blocks, memory)
        servers.append(HostedSpan(span, 1.0, speed.head_blocks))
    assert gaps([each.span for each in servers], Span(0, 18)) == []
    first, within, last = sorted((each.span for each in servers), key=lambda span: span.start)
    assert max(len(first), len(last)) <= 5 < len(within)
