"""Each attention backend is right, by itself and as the choice at start sees it."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from corolla.cache.store import KVStore
from corolla.chassis.errors import StartupError
from corolla.compute.attention import backends, paged_triton
from corolla.compute.attention.backends import BACKENDS, choose_backend, largest_difference
from corolla.compute.attention.base import AttentionBatch, AttentionShape, LayerInput, PackedRow
from corolla.compute.attention.compiled_attention import CompiledAttention
from corolla.compute.attention.sdpa import SdpaAttention
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.paged_attention import PagedDefinition

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["compiled", "sdpa"])
@pytest.mark.parametrize(
    "window, has_sinks, softcap",
    [(None, False, None), (4, False, None), (40, False, None), (None, True, None), (4, True, 0.7), (None, False, 0.7)],
)
@pytest.mark.parametrize("page_tokens", [4, 32])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_backends_equal_the_definition_in_float64(
    name: str, window: int | None, has_sinks: bool, softcap: float | None, page_tokens: int, dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    shape = AttentionShape(window=window, has_sinks=has_sinks, softcap=softcap)
    assert largest_difference(BACKENDS[name](), CPU, dtype, page_tokens, shape) <= tolerance


@pytest.mark.parametrize("num_heads, size, rotated_size", [(3, 24, 8), (20, 32, 16)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_sums_of_latents_equal_the_definition_in_float64(
    num_heads: int, size: int, rotated_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    """In a text of two pieces; what has no function, such as sizes that 16 does not divide, torch computes."""
    shape = AttentionShape(num_heads, 1, size + rotated_size, size, rotated_size=rotated_size)
    assert largest_difference(CompiledAttention(), CPU, dtype, 32, shape, pages_of_text=33) <= tolerance


@pytest.mark.parametrize("name", ["compiled", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
def test_the_trial_of_a_text_of_many_pages(name: str, window: int | None) -> None:
    """More tokens than are compared."""
    difference = largest_difference(
        BACKENDS[name](), CPU, torch.float32, 64, AttentionShape(window=window), pages_of_text=20
    )
    assert difference <= 2e-6


@pytest.mark.parametrize("sizes", [(64, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_has_the_bits_of_transformers_without_copies_of_shared_keys(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    num_tokens, num_keys, generator = 6, 4000, torch.Generator().manual_seed(0)
    query = torch.randn(num_tokens, 32, sizes[0], generator=generator).to(dtype)
    key, value = (torch.randn(num_keys, 2, size, generator=generator).to(dtype) for size in sizes)
    store = KVStore(num_keys // 32, 32, [None])
    cache = store.new_cache()
    cache.reserve(num_keys)
    cache.prepare(0, num_keys)
    before = num_keys - num_tokens
    AttentionBatch(store, [PackedRow(cache, 0, 0, before)], SdpaAttention()).write(0, key[:before], value[:before])
    batch = AttentionBatch(store, [PackedRow(cache, before, 0, num_tokens)], SdpaAttention())
    given = LayerInput(0, query, key[before:], value[before:], 0.125)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        found = batch.backend.attend(batch, given)
    mask = torch.ones(num_tokens, num_keys, dtype=torch.bool).tril(before)
    module: Any = SimpleNamespace(num_key_value_groups=16, is_causal=True)
    of_row, keys, values = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    expected, _ = sdpa_attention_forward(module, of_row, keys, values, mask[None, None], scaling=0.125)
    assert torch.equal(found, expected[0])
    if sizes[0] == sizes[1]:
        events: Any = profiler.profiler.kineto_results.events()
        changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
        assert max(itertools.accumulate(change for _, change in changes)) < 4 * (key.nbytes + value.nbytes)


@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("page_tokens", [4, 32])
def test_page_tables_lead_to_the_right_keys(window: int | None, page_tokens: int) -> None:
    """A definition takes the place of the kernel, which runs on GPUs only."""
    for shape in (AttentionShape(window=window), AttentionShape(3, 1, 32, 24, rotated_size=8)):
        assert largest_difference(PagedDefinition(), CPU, torch.float32, page_tokens, shape) <= 3e-6


def test_the_fastest_backend_is_chosen_unless_another_is_named() -> None:
    assert choose_backend("auto", CPU, torch.float32, 32).name == "compiled"
    assert choose_backend("sdpa", CPU, torch.float32, 32).name == "sdpa"


def test_attention_by_triton_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_triton, "missing", lambda: "triton is not installed")
    with pytest.raises(StartupError, match=r"COROLLA_ATTENTION=triton .* cpu .*: triton is not installed"):
        choose_backend("triton", CPU, torch.float32, 32)


def test_a_backend_with_wrong_results_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SdpaAttention):
        def attend(self, batch: AttentionBatch, *arguments: Any, **options: Any) -> torch.Tensor:
            output: torch.Tensor = super().attend(batch, *arguments, **options)
            return output + 1e-3

    monkeypatch.setitem(backends.BACKENDS, "compiled", Wrong)
    assert choose_backend("auto", CPU, torch.float32, 32).name == "sdpa"
    with pytest.raises(StartupError, match="differ by"):
        choose_backend("compiled", CPU, torch.float32, 32)


def test_a_backend_is_tried_with_the_heads_windows_and_bounds_of_the_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(SdpaAttention):
        """Refuses some sizes of heads, or windows, or bounds, as kernels do."""

        name = "picky"

        def __init__(self, refuses: Callable[[LayerInput], bool]) -> None:
            self._refuses = refuses

        def attend(self, batch: AttentionBatch, given: LayerInput) -> torch.Tensor:
            if self._refuses(given):
                raise ValueError("no kernel for that")
            return super().attend(batch, given)

    folder = make_tiny_checkpoint("gemma2", tmp_path, config_changes={"head_dim": 24, "num_key_value_heads": 1})
    checkpoint = Checkpoint.from_pretrained(str(folder))
    refusals: list[tuple[Callable[[LayerInput], bool], str]] = [
        (lambda given: given.query.shape[-1] == 24, "sdpa"),
        (lambda given: given.key.shape[1] == 1, "sdpa"),
        (lambda given: given.window is not None, "sdpa"),
        (lambda given: given.softcap == checkpoint.config.attn_logit_softcapping, "sdpa"),
        (lambda given: given.query.shape[-1] == 64, "picky"),
    ]
    for refuses, chosen in refusals:
        monkeypatch.setitem(backends.BACKENDS, "compiled", partial(Picky, refuses))
        runner = SpanRunner(load_span(checkpoint, Span(0, 2), dtype=torch.float32), num_pages=4, page_tokens=8)
        assert runner.backend.name == chosen


def test_a_server_without_a_compiler_uses_the_next_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert choose_backend("auto", CPU, torch.float32, 32).name == "sdpa"
    with pytest.raises(StartupError, match="llvmlite is not installed"):
        choose_backend("compiled", CPU, torch.float32, 32)
