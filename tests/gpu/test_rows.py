"""A row's output depends on its session only: not on how its text was cut, nor on what was computed beside it."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corolla.cache.store import SessionCache
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gpu.devices import Device, on_half_precision

SPAN = Span(1, 4)
NUM_TOKENS = 300
NUM_MIXTURES = 50
# Torch's products on a CPU may round by the number of rows.
TOLERANCE = 1e-4


@dataclass
class Neighbour:
    """Another session, whose rows run beside those that are compared."""

    cache: SessionCache
    hidden: Tensor


def runner_on(device: Device, folder: Path) -> SpanRunner:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
             "head_dim": 32}  # fmt: skip
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", folder / "tiny", config_changes=shape)))
    model = load_span(checkpoint, SPAN, dtype=device.torch_dtype, device=device.name)
    runner = SpanRunner(model, num_pages=40 * (NUM_TOKENS // device.page_tokens + 2), page_tokens=device.page_tokens)
    runner.warm_up()
    return runner


def text(seed: int) -> Tensor:
    return torch.randn(NUM_TOKENS, 256, generator=torch.Generator().manual_seed(seed))


def whole(runner: SpanRunner, hidden: Tensor) -> Tensor:
    cache = runner.new_cache()
    cache.allocate(NUM_TOKENS)
    try:
        return runner.forward([RowWork(cache, 0, NUM_TOKENS)], hidden, SPAN).float().cpu()
    finally:
        cache.clear()


def in_mixture(runner: SpanRunner, hidden: Tensor, draw: random.Random) -> Tensor:
    """The same text in drawn chunks beside drawn rows of others, forked and computed again in part."""
    cache = runner.new_cache()
    cache.allocate(NUM_TOKENS)
    held = [cache]
    others = [Neighbour(runner.new_cache(), text(1000 + draw.randrange(99))) for _ in range(draw.randrange(0, 9))]
    for other in others:
        other.cache.allocate(NUM_TOKENS)
    held += [other.cache for other in others]
    most = draw.choice([1, 3, 17, 64, NUM_TOKENS])
    outputs: list[Tensor] = []
    position = 0
    try:
        while position < NUM_TOKENS:
            event = draw.random()
            if position and event < 0.05:
                # A session that resumes runs some of its tokens again.
                position -= draw.randrange(1, min(position, 20) + 1)
                outputs = [torch.cat(outputs)[:position]] if position else []
            elif position and event < 0.1:
                twin = cache.fork()
                held[0].clear()
                held[0] = cache = twin
                cache.allocate(NUM_TOKENS)
            count = min(draw.randrange(1, most + 1), NUM_TOKENS - position)
            rows, inputs = [RowWork(cache, position, count)], [hidden[position : position + count]]
            for other in others:
                begin = other.cache.num_tokens
                size = min(draw.choice([1, 1, 1, 40]), NUM_TOKENS - begin)
                if size and draw.random() < 0.8:
                    place = draw.randrange(len(rows) + 1)
                    rows.insert(place, RowWork(other.cache, begin, size))
                    inputs.insert(place, other.hidden[begin : begin + size])
            start = sum(row.num_tokens for row in rows[: [row.cache for row in rows].index(cache)])
            found = runner.forward(rows, torch.cat(inputs), SPAN)
            outputs.append(found[start : start + count].float().cpu())
            position += count
        return torch.cat(outputs)
    finally:
        for each in held:
            each.clear()


@on_half_precision()
def test_rows_have_the_same_bits_in_every_mixture(tmp_path: Path, device: Device) -> None:
    runner, hidden = runner_on(device, tmp_path), text(0)
    expected = whole(runner, hidden)
    assert torch.equal(whole(runner, hidden), expected)
    unlike = []
    for seed in range(NUM_MIXTURES):
        found = in_mixture(runner, hidden, random.Random(seed))
        if device.is_gpu:
            unlike.append(int((found != expected).any(dim=-1).sum()))
        else:
            assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
    assert unlike == [0] * len(unlike), f"rows with other bits, of {NUM_TOKENS}, by mixture"


@on_half_precision()
def test_half_precision_is_as_far_from_float64_as_rounding_takes_it(tmp_path: Path, device: Device) -> None:
    """The family's own blocks are the measure: their error in the same dtype, against them in float64."""
    runner, hidden = runner_on(device, tmp_path), text(1)
    checkpoint = Checkpoint.from_pretrained(str(tmp_path / "tiny"))
    exact, rounded = (
        load_span(checkpoint, SPAN, dtype=dtype)(hidden.to(dtype).unsqueeze(0))[0].float()
        for dtype in (torch.float64, device.torch_dtype)
    )

    def error(found: Tensor) -> float:
        return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max())

    assert error(whole(runner, hidden)) < 1.5 * error(rounded)


@pytest.mark.full
def test_a_mixture_that_reads_another_sessions_keys_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself can fail."""
    device = Device("cpu", "float32")
    runner, hidden = runner_on(device, tmp_path), text(0)
    expected = whole(runner, hidden)
    found = in_mixture(runner, hidden.flip(0), random.Random(0))
    assert not torch.allclose(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
