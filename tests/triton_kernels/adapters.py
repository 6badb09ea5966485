"""Batches with adapters by the Triton kernels equal PEFT, and no token depends on the others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.compute import graph_choice
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.adapters.loading import load_adapter
from corolla.models.adapters.products import SpanAdapter
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.adapters import AdaptedModel, make_adapter
from tests.checkpoints import make_tiny_checkpoint
from tests.triton_kernels import DEVICE
from tests.triton_kernels.ordered_products import install
from tests.triton_kernels.recorded_launches import record
from tests.triton_kernels.spans import products

__all__ = ["products"]

BLOCKS = Span(0, 1)
TEXT = list(range(20, 33))
KINDS: list[dict[str, Any]] = [{"r": 20}, {"target_modules": ["k_proj", "up_proj"], "r": 3}]


@pytest.fixture(autouse=True, scope="module")
def one_order(products: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.mark.full
def test_batches_of_adapters_equal_peft_and_rows_keep_their_bits_in_recorded_steps(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "model", num_blocks=2)
    folders = [make_adapter(folder, tmp_path / f"{seed}", seed=seed, **kind) for seed, kind in enumerate(KINDS)]
    span = load_span(Checkpoint.from_pretrained(str(folder)), BLOCKS, dtype=torch.float32, device=DEVICE)
    runner = SpanRunner(span, num_pages=60, page_tokens=8, attention="triton", has_scratch_page=True)
    assert runner.kernel_choices.adapters == "triton"
    adapters: list[SpanAdapter | None] = [None, *(load_adapter(each, span, 2) for each in folders)]
    states = [AdaptedModel(folder, each).hidden_states(TEXT) for each in (None, *folders)]
    inputs = states[0][0]

    def run(cuts: list[tuple[int, int]], chosen: list[int]) -> list[Tensor]:
        """The outputs of the text with each of the chosen adapters, computed together."""
        caches = [runner.new_cache() for _ in chosen]
        for cache in caches:
            cache.allocate(len(TEXT))
        found: list[list[Tensor]] = [[] for _ in chosen]
        for start, end in cuts:
            rows = [
                RowWork(cache, start, end - start, adapter=adapters[index])
                for cache, index in zip(caches, chosen, strict=True)
            ]
            output = runner.forward(rows, torch.cat([inputs[start:end]] * len(rows)), BLOCKS).to("cpu")
            for part, own in zip(torch.split(output, end - start), found, strict=True):
                own.append(part)
        for cache in caches:
            cache.clear()
        return [torch.cat(own) for own in found]

    length = len(TEXT)
    whole = run([(0, length)], [0, 1, 2])
    for output, expected in zip(whole, states, strict=True):
        torch.testing.assert_close(output, expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(run([(0, length)], [0])[0], whole[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_choice, "SIZES", (4,))
        graph_choice.choose_graphs(runner, lambda: record if DEVICE == "cpu" else CudaCapture(torch.device(DEVICE)))
    assert runner.decode_graphs is not None
    num_replays = runner.decode_graphs.num_replays
    singles = [(0, length - 2), (length - 2, length - 1), (length - 1, length)]
    for chosen in ([2, 0, 1], [1]):
        assert all(torch.equal(found, whole[index]) for found, index in zip(run(singles, chosen), chosen, strict=True))
    assert runner.decode_graphs.num_replays == num_replays + 4
