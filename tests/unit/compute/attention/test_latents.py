"""Rows give what transformers gives, within bounded memory, however latents are read and rows are divided."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from corolla.cache.store import KVStore
from corolla.compute.attention import compiled_attention, latents
from corolla.compute.attention.base import CALLED, AttentionBatch, PackedRow
from corolla.compute.attention.compiled_attention import CompiledAttention
from corolla.compute.attention.latents import (
    bytes_of_key,
    bytes_of_latent,
    latent_attention,
    reads_latents,
    runs_within,
)
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

SPAN = Span(1, 4)
# They rotate keys in two ways; test_span_runner has the other families.
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
# Heads as in DeepSeek-V3, fewer of them.
WIDE = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_runs_are_all_rows_in_order_and_within_bounds(costs: list[int], most: int) -> None:
    runs = [costs[run] for run in runs_within(costs, most)]
    assert [cost for run in runs for cost in run] == costs
    assert all(run and (len(run) == 1 or sum(run) <= most) for run in runs)
    # No two neighbours would fit together with the next one's first row.
    assert all(sum(run) + after[0] > most for run, after in itertools.pairwise(runs))


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_rows_give_what_transformers_does_together_apart_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / "tiny")))
    model = load_span(checkpoint, SPAN, dtype=torch.float32)
    steps, generator = ((120, 130, 7), (1, 1, 1), (4, 1, 2)), torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(numbers), 64, generator=generator) for numbers in steps]
    split = [torch.split(each, list(numbers)) for each, numbers in zip(inputs, steps, strict=True)]
    texts = [torch.cat(parts) for parts in zip(*split, strict=True)]
    expected = [model(text.unsqueeze(0))[0] for text in texts]
    assert [reads_latents(model.config, number) for number in (*steps[0], 1)] == [False, False, True, True]
    attention: Any = next(module for module in model.modules() if hasattr(module, "expand_kv"))
    expand, expanded = type(attention).expand_kv, []

    def counted(module: Any, given: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        expanded.append(given.shape[2])
        keys, values = expand(module, given, rotated)
        return keys, values

    monkeypatch.setattr(type(attention), "expand_kv", counted)
    sizes = []
    for most_tokens in (10_000, 140, 3):
        most = most_tokens * bytes_of_key(model.config, torch.empty(0), num_queries=130)
        monkeypatch.setattr(latents, "MAX_EXPANDED_BYTES", most)
        runner = SpanRunner(model, num_pages=64, page_tokens=8, products="library")
        caches = [runner.new_cache() for _ in range(3)]
        for cache in caches:
            cache.reserve(144)
        outputs = []
        for hidden, numbers in zip(inputs, steps, strict=True):
            rows = [RowWork(cache, cache.num_tokens, count) for cache, count in zip(caches, numbers, strict=True)]
            outputs.append(torch.split(runner.forward(rows, hidden, SPAN), list(numbers)))
        for parts, whole in zip(zip(*outputs, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)
        sizes.append(expanded[:])
        expanded.clear()
    # Both long rows in three blocks; the steps of few tokens expand nothing.
    assert sizes[:2] == [[250] * 3, [120, 130] * 3]
    assert max(sizes[2]) == 3
    assert sum(sizes[2]) == 250 * 3
    # A decode step over 121 latents takes several pieces, too.
    assert most // bytes_of_latent(torch.empty(0, 4, 24), 1) < 121


@pytest.mark.parametrize("attention", ["compiled", "sdpa"])
def test_a_row_has_the_same_bits_alone_and_next_to_others(tmp_path: Path, attention: str) -> None:
    folder = make_tiny_checkpoint("deepseek_v3", tmp_path / "tiny", config_changes=WIDE)
    model = load_span(Checkpoint.from_pretrained(str(folder)), Span(0, 1), dtype=torch.float32)
    runner = SpanRunner(model, num_pages=64, page_tokens=16, products="library", attention=attention)
    caches, generator = [runner.new_cache() for _ in range(3)], torch.Generator().manual_seed(0)
    given = [torch.randn(120, 1, size, generator=generator) for size in (512, 64)]
    for cache in caches:
        cache.reserve(120)
        cache.prepare(0, 120)
        AttentionBatch(runner.store, [PackedRow(cache, 0, 0, 120)], runner.backend).write(0, *given)
        cache.commit(120)
    module: Any = next(module for module in runner.model.modules() if hasattr(module, "expand_kv"))

    def attended(query: Tensor, rows: list[PackedRow]) -> Tensor:
        CALLED.set(AttentionBatch(runner.store, rows, runner.backend))
        return latent_attention(module, query, query, query, None)[0][0]

    query = torch.randn(1, 16, 7, 192, generator=generator)
    query[:, :, 1] = query[:, :, 0]
    places = ((0, 119, 0, 1), (2, 119, 1, 2), (1, 115, 2, 7))
    rows = [PackedRow(caches[index], *place) for index, *place in places]
    together = attended(query, rows)
    assert torch.equal(together[:1], attended(query[:, :, :1], rows[:1]))
    assert torch.equal(together[:1], together[1:2])
    assert torch.equal(together[2:], attended(query[:, :, 2:], [PackedRow(caches[1], 115, 0, 5)]))


def test_compiled_sums_have_the_same_bits_in_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """In short rows, and in long ones, which have one piece of keys; whatever the threads and registers."""
    num_heads, num_tokens, generator = 20, 2100, torch.Generator().manual_seed(0)
    given = [torch.randn(num_tokens, 1, size, generator=generator) for size in (32, 16)]
    query = torch.randn(num_tokens, num_heads, 48, generator=generator)
    backend, store = CompiledAttention(), KVStore(140, 16, [None], max_step_tokens=num_tokens)
    cache = store.new_cache()
    cache.reserve(num_tokens)
    cache.prepare(0, num_tokens)
    AttentionBatch(store, [PackedRow(cache, 0, 0, num_tokens)], backend).write(0, *given)

    def summed(start: int, end: int) -> Tensor:
        batch = AttentionBatch(store, [PackedRow(cache, start, 0, end - start)], backend)
        found = backend.attend_to_latents(batch, 0, query[start:end], 0.2)
        assert found is not None
        return found

    whole = {end - start: summed(start, end) for start, end in ((2040, 2048), (2020, 2100))}
    monkeypatch.setattr(compiled_attention, "max_sums", lambda: 6)
    for start, end in ((2040, 2041), (2041, 2048), (2044, 2046)):
        assert torch.equal(summed(start, end), whole[8][start - 2040 : end - 2040])
    for start, end in ((2020, 2031), (2031, 2100)):
        assert torch.equal(summed(start, end), whole[80][start - 2020 : end - 2020])


def test_a_row_whose_index_picks_tokens_reads_their_latents_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("deepseek_v32", tmp_path / "tiny")))
    outputs, expanded, hidden = [], list[int](), torch.randn(135, 64, generator=torch.Generator().manual_seed(0))
    # The second time, an expanded text would take too much memory.
    for is_fused, most_bytes in ((True, 1 << 30), (True, 1), (False, 1)):
        model = load_span(checkpoint, Span(0, 1), dtype=torch.float32)
        attention: Any = next(module for module in model.modules() if hasattr(module, "expand_kv"))
        expand = type(attention).expand_kv

        def counted(module: Any, given: Tensor, rotated: Tensor, expand: Any = expand) -> tuple[Tensor, Tensor]:
            expanded.append(given.shape[2])
            keys, values = expand(module, given, rotated)
            return keys, values

        with monkeypatch.context() as patch:
            patch.setattr(type(attention), "expand_kv", counted)
            patch.setattr(latents, "MAX_EXPANDED_BYTES", most_bytes)
            runner = SpanRunner(model, page_tokens=8, products="library", is_fused=is_fused)
            cache = runner.new_cache()
            cache.reserve(135)
            parts = torch.split(hidden, [10, 120, 4, 1])
            outputs += [
                torch.cat(
                    [runner.forward([RowWork(cache, cache.num_tokens, len(part))], part, Span(0, 1)) for part in parts]
                )
            ]
    assert expanded == [130, 10, 130, 134, 135]
    for output in outputs[:2]:
        torch.testing.assert_close(output, outputs[2], rtol=1e-4, atol=1e-4)


def peak_of_attention(num_tokens: int, num_queries: int, runner: SpanRunner) -> tuple[int, Tensor]:
    """The most bytes of tensors that the attention of one row holds at once, and what it gives."""
    cache = runner.new_cache()
    cache.reserve(num_tokens)
    cache.prepare(0, num_tokens)
    generator = torch.Generator().manual_seed(0)
    whole = AttentionBatch(runner.store, [PackedRow(cache, 0, 0, num_tokens)], runner.backend)
    dtype = runner.model.dtype
    whole.write(0, *(torch.randn(num_tokens, 1, size, generator=generator).to(dtype) for size in (512, 64)))
    cache.commit(num_tokens)
    row = PackedRow(cache, num_tokens - num_queries, 0, num_queries)
    CALLED.set(AttentionBatch(runner.store, [row], runner.backend))
    query = torch.randn(1, 16, num_queries, 192, generator=generator).to(dtype)
    module: Any = next(module for module in runner.model.modules() if hasattr(module, "expand_kv"))
    peak, output = peak_bytes(lambda: latent_attention(module, query, query, query, None))
    cache.clear()
    return peak, output


def peak_bytes(work: Callable[[], tuple[Tensor, None]]) -> tuple[int, Tensor]:
    """The most bytes that torch's allocator had handed out at once during some work, and what the work gives.

    What the process holds says less: memory that earlier tests have given back counts as held.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output, _ = work()
    events: Any = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes)), output


@pytest.mark.parametrize(
    "num_queries, num_tokens, dtype, tolerance, most_mib",
    [
        pytest.param(1, 5_000, torch.bfloat16, 2e-2, 2, id="latents in half precision"),
        pytest.param(60, 6_000, torch.float32, 1e-5, 16, id="scores over latents"),
        pytest.param(200, 1_000, torch.float32, 1e-5, 16, id="expanded"),
    ],
)
def test_one_row_takes_no_more_than_its_share(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_queries: int,
    num_tokens: int,
    dtype: torch.dtype,
    tolerance: float,
    most_mib: int,
) -> None:
    folder = make_tiny_checkpoint("deepseek_v3", tmp_path / "tiny", config_changes=WIDE)
    model = load_span(Checkpoint.from_pretrained(str(folder)), Span(0, 1), dtype=dtype)
    runner = SpanRunner(model, num_pages=320, page_tokens=32, products="library", attention="sdpa")
    most = most_mib << 20
    if reads_latents(model.config, num_queries):
        key_bytes = bytes_of_latent(torch.empty(0, 16, 576, dtype=dtype), num_queries)
    else:
        key_bytes = bytes_of_key(model.config, torch.empty(0, dtype=dtype), num_queries)
    assert num_tokens * key_bytes > 4 * most
    undivided_peak, expected = peak_of_attention(num_tokens, num_queries, runner)
    monkeypatch.setattr(latents, "MAX_EXPANDED_BYTES", most)
    peak, output = peak_of_attention(num_tokens, num_queries, runner)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=tolerance)
    longest_undivided_peak, _ = peak_of_attention(most // key_bytes, num_queries, runner)
    assert undivided_peak > 3 * most
    # Which copies torch makes depends on the processor. The scores and what is expanded are there on all of them.
    for each in (peak, longest_undivided_peak):
        assert most / 5 < each < 1.1 * most
