"""CUDA graphs on a device: the server chooses recorded steps, which give the bits of launched ones."""

from functools import partial
from pathlib import Path

import pytest
import torch

from corolla.compute.base import RowWork
from corolla.compute.graph_choice import choose_graphs
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]

SPAN, DTYPE = Span(1, 4), torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_replays_give_the_bits_of_launched_steps(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family)))
    device = torch.device("cuda")
    launching, replaying = (
        SpanRunner(
            load_span(checkpoint, SPAN, dtype=DTYPE, device=device),
            num_pages=64, page_tokens=64, attention="triton", has_scratch_page=True,
        )
        for _ in range(2)
    )  # fmt: skip
    for runner in (launching, replaying):
        runner.warm_up()
    choose_graphs(replaying, partial(CudaCapture, device))
    assert replaying.decode_graphs is not None
    caches = [[runner.new_cache() for _ in range(7)] for runner in (launching, replaying)]
    generator = torch.Generator().manual_seed(0)
    for turn in range(300):
        together = sorted({(turn * step) % 7 for step in range(1 + turn % 7)})
        hidden = torch.randn(len(together), checkpoint.hidden_size, generator=generator)
        expected, found = (
            runner.forward([RowWork(held[number], held[number].num_tokens, 1) for number in together], hidden, SPAN)
            for runner, held in zip((launching, replaying), caches, strict=True)
        )
        assert torch.equal(found, expected)
    assert replaying.decode_graphs.num_replays >= 300
