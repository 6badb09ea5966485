"""Blocks with adapters equal what PEFT computes with the unsplit model, alone and in batches with others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.cache.store import SessionCache
from corolla.chassis.errors import AdapterError
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.adapters.loading import load_adapter
from corolla.models.adapters.products import AdapterBatch, AdapterStacks, LowRank, SpanAdapter
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.adapters import AdaptedModel, make_adapter
from tests.checkpoints import make_tiny_checkpoint

NUM_BLOCKS = 3
BLOCKS = Span(0, NUM_BLOCKS - 1)
TEXT = list(range(20, 60))

KINDS: list[dict[str, Any]] = [
    {"r": 4},
    {"r": 8, "use_rslora": True},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 3}},
    {"target_modules": r".*\.1\..*_proj"},
]


class Harness:
    """A span, its adapters, and for each of them and for none what the unsplit model gives after these blocks."""

    def __init__(self, family: str, folder: Path, *, is_fused: bool, kinds: list[dict[str, Any]]) -> None:
        checkpoint = make_tiny_checkpoint(family, folder / "model", num_blocks=NUM_BLOCKS)
        folders = [make_adapter(checkpoint, folder / f"{seed}", seed=seed, **kind) for seed, kind in enumerate(kinds)]
        span = load_span(Checkpoint.from_pretrained(str(checkpoint)), BLOCKS, dtype=torch.float32)
        self.runner = SpanRunner(span, num_pages=256, is_fused=is_fused, products="library")
        span.take_adapters()
        self.adapters: list[SpanAdapter | None] = [None, *(load_adapter(each, span, NUM_BLOCKS) for each in folders)]
        states = [AdaptedModel(checkpoint, each).hidden_states(TEXT) for each in (None, *folders)]
        self.inputs = states[0][0]
        self.expected = [each[len(BLOCKS)] for each in states]

    def caches(self, num_tokens: int = 0) -> list[SessionCache]:
        """One for each adapter, with the text's beginning in it."""
        caches = [self.runner.new_cache() for _ in self.adapters]
        for cache in caches:
            cache.reserve(len(TEXT))
        if num_tokens:
            self.run(caches, 0, num_tokens)
        return caches

    def run(self, caches: list[SessionCache], start: int, end: int) -> list[Tensor]:
        """Computes these tokens for all adapters in one batch."""
        rows = [
            RowWork(cache, start, end - start, adapter=adapter)
            for cache, adapter in zip(caches, self.adapters, strict=True)
        ]
        hidden = torch.cat([self.inputs[start:end]] * len(rows))
        return list(torch.split(self.runner.forward(rows, hidden, BLOCKS), end - start))


def check(outputs: list[Tensor], expected: list[Tensor], start: int, end: int) -> None:
    for output, states in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, states[start:end], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family, is_fused",
    [
        ("llama", True), ("llama", False), ("qwen3", True), ("gemma3_text", False), ("gemma", True),
        pytest.param("qwen2_moe", True, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_batch_of_several_adapters_equals_peft(family: str, is_fused: bool, tmp_path: Path) -> None:
    harness = Harness(family, tmp_path, is_fused=is_fused, kinds=KINDS)
    base = harness.expected[0]
    assert all((base - states).abs().max() > 0.05 for states in harness.expected[1:])
    check(harness.run(harness.caches(), 0, 30), harness.expected, 0, 30)  # one after the other
    check(harness.run(harness.caches(30), 30, 31), harness.expected, 30, 31)  # side by side
    check(harness.run(harness.caches(30), 30, 35), harness.expected, 30, 35)


@pytest.mark.parametrize(
    "family",
    [
        "phi3", "olmo3", "falcon", "qwen3_moe", "gpt_neox", "cohere2", "opt", "deepseek_v3",
        pytest.param("qwen3_next", marks=pytest.mark.kind),
    ],
)  # fmt: skip
def test_families_of_other_shapes(family: str, tmp_path: Path) -> None:
    targets = {
        "qwen3_moe": ["q_proj", "o_proj"],
        "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"],
        "qwen3_next": ["q_proj", "in_proj_qkvz"],
    }
    kind = {"target_modules": targets[family]} if family in targets else {}
    harness = Harness(family, tmp_path, is_fused=True, kinds=[kind, kind])
    check(harness.run(harness.caches(), 0, 30), harness.expected, 0, 30)
    check(harness.run(harness.caches(30), 30, 31), harness.expected, 30, 31)


def test_what_expands_the_cached_latents_of_earlier_tokens_takes_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"it changes kv_b_proj, whose weights are read"):
        Harness("deepseek_v3", tmp_path, is_fused=True, kinds=[{"target_modules": ["kv_b_proj"]}])


def test_a_base_row_is_the_same_bit_for_bit_next_to_rows_with_adapters(tmp_path: Path) -> None:
    harness = Harness("llama", tmp_path, is_fused=True, kinds=KINDS)
    mixed = harness.run(harness.caches(30), 30, 31)[0]
    harness.adapters = [None] * len(harness.adapters)
    without = harness.run(harness.caches(30), 30, 31)[0]
    torch.testing.assert_close(mixed, without, rtol=0, atol=0)


def test_a_batch_without_adapters_calls_nothing_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness("llama", tmp_path, is_fused=True, kinds=KINDS[:1])
    caches = harness.caches(30)
    for name in ("__init__", "add"):
        monkeypatch.setattr(AdapterBatch, name, None)
    with pytest.raises(TypeError):
        harness.run(caches, 30, 31)
    harness.adapters = [None] * len(harness.adapters)
    harness.run(caches, 30, 31)


def test_stacks_are_reused_and_bounded() -> None:
    def adapter() -> SpanAdapter:
        product = LowRank(torch.ones(2, 8), torch.ones(2, 8), 0)
        return SpanAdapter({(0, ("q",)): [product]})

    first, second, third = adapter(), adapter(), adapter()
    stacks = AdapterStacks(max_bytes=first.nbytes * 5)
    three = stacks.stack_of([first, second, third])
    assert stacks.stack_of([third, first]) is three
    assert stacks.stack_of([first]).places is first.places
    pair = stacks.stack_of([adapter(), second])
    assert three.nbytes + pair.nbytes == first.nbytes * 5
    stacks.stack_of([adapter(), first])
    assert stacks.stack_of([first, second, third]) is not three
    stacks.forget(second)
    assert stacks.stack_of([first, second, third]) is not three
