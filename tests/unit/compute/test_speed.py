"""What is planned by the size and speed of one block fits every block."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.compute.span_runner import SpanRunner
from corolla.compute.speed import measure_speed
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import head_bytes
from corolla.models.span_model import SpanModel, load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint


@pytest.mark.parametrize(
    "family, numbers_per_token",
    [
        pytest.param("llama", 2 * 2 * 16, id="keys and values of two heads"),
        pytest.param("deepseek_v3", 16 + 8, id="experts behind dense blocks, and latents"),
        pytest.param("qwen3_moe", 2 * 2 * 16, id="a dense block among experts"),
        pytest.param("lfm2", 2 * 2 * 16, id="larger blocks with a recurrent state"),
        pytest.param("jamba", 2 * 2 * 16, id="experts in blocks with states only"),
    ],
)
def test_the_largest_block_is_measured(tmp_path: Path, family: str, numbers_per_token: int) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family)))
    speed = measure_speed(checkpoint, torch.float32, "cpu")
    sizes = [load_span(checkpoint, Span(block, block + 1), dtype=torch.float32).nbytes for block in range(5)]
    assert speed.block_bytes == max(sizes)
    assert speed.head_blocks == head_bytes(checkpoint, torch.float32) / max(sizes)
    assert speed.cache_bytes_per_token == numbers_per_token * torch.float32.itemsize
    assert speed.decode_tokens_per_second > 0


@pytest.mark.parametrize("family", ["llama", "jamba"])
def test_keys_and_values_take_what_the_server_stores(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family)))
    plain = measure_speed(checkpoint, torch.float32, "cpu")
    new_runner = partial(SpanRunner, page_tokens=8, attention="sdpa", kv_cache_dtype="fp8")
    stored = measure_speed(checkpoint, torch.float32, "cpu", kv_cache_dtype="fp8", new_runner=new_runner)
    assert stored.cache_bytes_per_token == plain.cache_bytes_per_token // torch.float32.itemsize


@pytest.mark.parametrize("family", ["llama", "jamba", "mamba2"])
def test_what_is_measured_is_what_will_run(tmp_path: Path, family: str) -> None:
    def new_runner(model: SpanModel, **options: Any) -> SpanRunner:
        # An option that the measurement sets, too, would be a TypeError.
        return SpanRunner(model, page_tokens=8, attention="sdpa", kv_cache_dtype="auto", **options)

    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family)))
    speed = measure_speed(checkpoint, torch.float32, "cpu", new_runner=new_runner)
    assert speed.cache_bytes_per_token > 0
