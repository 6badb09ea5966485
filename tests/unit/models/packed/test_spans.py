"""Spans whose weights stay packed compute what the expanded ones compute, and take the memory that the file takes."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, SettingsError
from corolla.chassis.weight_formats import weight_format
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.kernels.layouts import LAYOUTS
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import head_bytes, load_edges
from corolla.models.packed.modules import PackedExpertWeights, PackedLinear, replace_packed
from corolla.models.span_model import load_span, make_span, weight_types
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import PACKED_FAMILIES, make_tiny_gguf, rewrite_gguf
from tests.tiers import quick

TOKEN_IDS = torch.arange(5, 45)
WHOLE = Span(0, 4)
SPLITS = ([WHOLE], [Span(0, 2), Span(2, 4)], [Span(0, 1), Span(1, 3), Span(3, 4)])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))


def file_of(folder: Path, family: str = "llama", kind: str = "Q4_1") -> Checkpoint:
    return Checkpoint.from_pretrained(str(make_tiny_gguf(family, folder, kind=kind)[1]))


def logits(checkpoint: Checkpoint, spans: list[Span], quantization: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of a chain of servers, of which the first one embeds and the last one has the head."""
    positions = torch.arange(len(TOKEN_IDS))
    first = load_edges(checkpoint, dtype=dtype, has_head=False, quantization=quantization)
    last = load_edges(checkpoint, dtype=dtype, has_embedding=False, quantization=quantization)
    hidden = first.embed(TOKEN_IDS, positions)
    for span in spans:
        runner = SpanRunner(load_span(checkpoint, span, dtype=dtype, quantization=quantization), products="library")
        cache = runner.new_cache()
        cache.reserve(len(TOKEN_IDS))
        hidden = runner.forward([RowWork(cache, 0, len(TOKEN_IDS))], hidden, span)
    return last.head(hidden)


@pytest.mark.parametrize("kind", quick(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"], "Q4_1"))
@pytest.mark.parametrize(
    "family", quick(sorted(PACKED_FAMILIES), "llama", kinds=sorted({*PACKED_FAMILIES} - {"llama"}))
)
def test_a_packed_chain_equals_itself_unsplit_and_the_expanded_one_up_to_rounding(
    tmp_path: Path, family: str, kind: str
) -> None:
    checkpoint = file_of(tmp_path, family, kind)
    expanded = logits(checkpoint, [WHOLE], "none")
    unsplit = logits(checkpoint, [WHOLE], "packed")
    torch.testing.assert_close(unsplit, expanded, rtol=1e-4, atol=1e-4)
    for spans in SPLITS[1:]:
        assert torch.equal(logits(checkpoint, spans, "packed"), unsplit)


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "glm4_moe", "gpt_oss", "granitemoeshared", "mixtral", "phi3", "qwen3_5_moe_text"],
)
def test_weights_that_files_have_in_other_orders_or_parts_are_packed_or_expanded(tmp_path: Path, family: str) -> None:
    checkpoint = file_of(tmp_path, family, "Q8_0")
    expanded, packed = (logits(checkpoint, [WHOLE], quantization) for quantization in ("none", "packed"))
    torch.testing.assert_close(packed, expanded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_of_hidden_states_are_split_without_a_difference_too(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = file_of(tmp_path)
    unsplit = logits(checkpoint, [WHOLE], "packed", dtype)
    for spans in SPLITS[1:]:
        assert torch.equal(logits(checkpoint, spans, "packed", dtype), unsplit)
    exact, expanded = logits(checkpoint, [WHOLE], "none"), logits(checkpoint, [WHOLE], "none", dtype)
    # Weights are rounded no more often than those that are expanded to this type.
    assert float((unsplit - exact).std()) < 1.2 * float((expanded - exact).std())


def test_a_row_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    checkpoint = file_of(tmp_path)
    runner = SpanRunner(load_span(checkpoint, WHOLE, dtype=torch.float32, quantization="packed"))
    hidden = torch.randn(12, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))

    def works() -> list[RowWork]:
        caches = [runner.new_cache() for _ in hidden]
        for cache in caches:
            cache.reserve(1)
        return [RowWork(cache, 0, 1) for cache in caches]

    together = runner.forward(works(), hidden, WHOLE)
    alone = torch.cat([runner.forward([work], row[None], WHOLE) for work, row in zip(works(), hidden, strict=True)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("family, kind", [("llama", "Q4_0"), ("llama", "Q8_0"), ("qwen3_moe", "Q4_0")])
def test_blocks_take_the_memory_that_they_take_in_the_file(tmp_path: Path, family: str, kind: str) -> None:
    checkpoint = file_of(tmp_path, family, kind)
    model = load_span(checkpoint, WHOLE, dtype=torch.float32, quantization="packed")
    assert checkpoint.gguf is not None
    stored = [checkpoint.gguf.tensors.stored(name) for name in checkpoint.weight_index if "layers." in name]
    in_file = sum(tensor.num_bytes for tensors in stored for tensor in tensors)
    buffers_of_none = 4 * 64  # of the rotary embedding
    assert in_file <= model.nbytes <= in_file + buffers_of_none
    before = model.nbytes
    model.make_fused(products="library")
    assert model.fused is not None
    assert model.nbytes == before
    assert make_span(checkpoint, Span(0, 1), dtype=torch.float32, quantization="packed").nbytes < before / 3


def test_tied_ends_share_their_weights(tmp_path: Path) -> None:
    _, path = make_tiny_gguf("gemma3_text", tmp_path, kind="Q8_0", changes={"tie_word_embeddings": True})
    checkpoint = Checkpoint.from_pretrained(str(path))
    edges = load_edges(checkpoint, dtype=torch.float32, quantization="packed")
    held = [module.panels for model in edges.modules for module in model.modules() if hasattr(module, "panels")]
    assert len(held) == 2
    assert held[0] is held[1]
    assert held[0].nbytes == head_bytes(checkpoint, torch.float32, "packed")
    assert head_bytes(checkpoint, torch.float32) == 4 * checkpoint.vocab_size * checkpoint.hidden_size
    plain = load_edges(checkpoint, dtype=torch.float32)
    positions = torch.arange(len(TOKEN_IDS))
    assert torch.equal(edges.embed(TOKEN_IDS, positions), plain.embed(TOKEN_IDS, positions))


def test_what_has_no_kernel_is_expanded_and_named(tmp_path: Path) -> None:
    path = make_tiny_gguf("qwen3_moe", tmp_path, kind="Q8_0")[1]
    whole = load_span(Checkpoint.from_pretrained(str(path)), WHOLE, dtype=torch.float32, quantization="packed")
    of_whole = [type(module) for module in whole.modules()]
    # Gate and up of the experts of one block have no type in common.
    ups = np.ones((4, 32, 64), dtype=np.float32)
    path = rewrite_gguf(path, tmp_path / "other.gguf", tensors={"blk.1.ffn_up_exps.weight": ups})
    checkpoint = Checkpoint.from_pretrained(str(path))
    model = load_span(checkpoint, WHOLE, dtype=torch.float32, quantization="packed")
    packed = [type(module) for module in model.modules()]
    assert packed.count(PackedExpertWeights) == of_whole.count(PackedExpertWeights) - 1 > 0
    assert packed.count(PackedLinear) == of_whole.count(PackedLinear)
    assert torch.equal(logits(checkpoint, SPLITS[1], "packed"), logits(checkpoint, [WHOLE], "packed"))
    assert weight_types(checkpoint, "packed") == (["Q8_0"], ["Q8_0"])
    assert weight_types(checkpoint, "none") == ([], ["Q8_0"])
    assert weight_types(file_of(tmp_path / "plain", kind="F16"), "packed") == ([], [])
    assert weight_format("float32", "packed", ["Q4_K"], ["Q3_K"]) == "packed/fp32: Q4_K, Q3_K expanded"
    assert weight_format("float32", "none") == "float32"


def test_other_checkpoints_and_devices_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(SettingsError, match="COROLLA_QUANTIZATION='packed' is for GGUF files and"):
        load_span(Checkpoint.from_pretrained(str(folder)), Span(0, 1), dtype=torch.float32, quantization="packed")
    checkpoint = file_of(tmp_path)
    with pytest.raises(SettingsError, match="does not work on cuda: triton is not installed"):
        load_span(checkpoint, Span(0, 1), dtype=torch.float32, device="cuda", quantization="packed")


@pytest.mark.parametrize("field", ["intermediate_size", "vocab_size"])
def test_a_file_whose_weights_have_another_shape_is_refused_before_they_are_read(tmp_path: Path, field: str) -> None:
    checkpoint = file_of(tmp_path)
    setattr(checkpoint.config, field, getattr(checkpoint.config, field) + 32)
    load = load_edges if field == "vocab_size" else partial(load_span, span=WHOLE)
    with pytest.raises(CheckpointError, match="of the shape"):
        load(checkpoint, dtype=torch.float32, quantization="packed")


def test_layers_narrower_than_a_block_are_refused_before_anything_is_multiplied() -> None:
    root = nn.ModuleDict({"one": nn.Linear(64, 32), "other": nn.Embedding(8, 288)})
    for name in root:
        with pytest.raises(CheckpointError, match="whose blocks have 256 columns"):
            replace_packed(root, {f"{name}.weight": LAYOUTS["Q4_K"]}, torch.float32, torch.device("cpu"))


def test_packed_and_expanded_servers_share_no_chain(tmp_path: Path) -> None:
    checkpoint = file_of(tmp_path)
    assert checkpoint.fingerprint("float32", "packed") != checkpoint.fingerprint("float32")


def test_layouts_have_whole_registers() -> None:
    for layout in LAYOUTS.values():
        offsets = (layout.sub_scales_at, layout.sub_minima_at, layout.low_at, layout.high_at, layout.block_bytes)
        assert not any(offset % 16 for offset in offsets)
