"""Latents are expanded for as many rows at once as memory allows, and rows give the same however they are divided."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.kv import latents
from corolla.block_server.kv.latents import expanded_token_bytes, runs_within
from corolla.block_server.runner import RowWork, Runner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

SPAN = Span(1, 4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_runs_are_all_rows_in_order_and_within_bounds(num_tokens: list[int], max_tokens: int) -> None:
    runs = [num_tokens[run] for run in runs_within(num_tokens, max_tokens)]
    assert [count for run in runs for count in run] == num_tokens
    assert all(run and (len(run) == 1 or sum(run) <= max_tokens) for run in runs)
    # No two neighbours would fit together with the next one's first row.
    assert all(sum(run) + after[0] > max_tokens for run, after in itertools.pairwise(runs))


def test_rows_give_the_same_in_one_call_and_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("deepseek_v3", tmp_path / "tiny")))
    model = load_span(checkpoint, SPAN, dtype=torch.float32)
    num_calls = 0
    forward = model.forward

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return forward(*given, **more)

    monkeypatch.setattr(model, "forward", counted)
    outputs = []
    for most_tokens in (10_000, 20):
        monkeypatch.setattr(latents, "MAX_EXPANDED_BYTES", most_tokens * expanded_token_bytes(model.config, 4))
        runner = Runner(model, num_pages=64, page_tokens=8, tuning_budget_s=0)
        caches = [runner.new_cache() for _ in range(3)]
        generator = torch.Generator().manual_seed(0)
        parts = []
        for numbers in ((7, 12, 30), (1, 1, 1), (4, 1, 2)):
            rows = []
            for cache, num_tokens in zip(caches, numbers, strict=True):
                cache.reserve(48)
                rows.append(RowWork(cache, cache.num_tokens, num_tokens))
            parts.append(runner.forward(rows, torch.randn(sum(numbers), 64, generator=generator), SPAN))
        outputs.append(torch.cat(parts))
    # Three steps in one call each, then those of 7 and 12, of 30, and of single rows.
    assert num_calls == 3 + (2 + 3 + 3)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
