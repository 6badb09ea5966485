"""What a plan expects of a checkpoint is what servers hold of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.compute.sizes import model_size
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import demo_checkpoint
from corolla.models.edges import load_edges
from corolla.models.families import FAMILIES
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.quantized_checkpoints import FORMATS, make_packed_checkpoint
from tests.tiers import quick

# A mask of this family's base model stands in every span of it, and in no block.
_WITH_MASKS = {"gpt_bigcode"}


def checkpoint_of(folder: Path, family: str) -> Checkpoint:
    return Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, folder / family)))


def held(checkpoint: Checkpoint, **options: Any) -> list[int]:
    """The bytes of each block, as a server loads it."""
    spans = (Span(block, block + 1) for block in range(checkpoint.num_blocks))
    return [load_span(checkpoint, span, **{"dtype": torch.float32, **options}).nbytes for span in spans]


@pytest.mark.parametrize("family", quick(sorted(FAMILIES), "deepseek_v3", "falcon_h1", "gemma3_text", "mamba"))
def test_a_server_holds_and_promises_what_is_planned(tmp_path: Path, family: str) -> None:
    checkpoint = checkpoint_of(tmp_path, family)
    model = model_size(checkpoint, torch.float32, "none", "auto")
    if family not in _WITH_MASKS:
        # Rotary tables of the base model are in each span, and in no block.
        assert [block.weight_bytes for block in model.blocks] == pytest.approx(held(checkpoint), rel=0.01)
    # A span that does not begin at block 0 may have other kinds of blocks.
    for span in (Span(0, checkpoint.num_blocks), Span(1, checkpoint.num_blocks - 1)):
        layout = model.cache_layout(span, page_tokens=4, max_step_tokens=8)
        loaded = load_span(checkpoint, span, dtype=torch.float32)
        runner = SpanRunner(
            loaded, num_pages=layout.session_pages(64), page_tokens=4, max_step_tokens=8, is_fused=False,
            num_state_pages=layout.num_state_pages,
        )  # fmt: skip
        cache = runner.new_cache()
        assert [layout.session_pages(length) for length in (1, 9, 64)] == [
            cache.worst_case(length) for length in (1, 9, 64)
        ]
        runner.warm_up()
        assert layout.state_bytes == sum(shape.nbytes for shape in runner.store.state_shapes.values())
        if any(block.token_bytes for block in model.blocks[span.start : span.end]):
            assert layout.page_bytes == runner.store.page_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", pytest.param("int8", marks=pytest.mark.full)])
def test_keys_and_values_in_eight_bits_have_the_planned_size(tmp_path: Path, kv_cache_dtype: str) -> None:
    checkpoint = checkpoint_of(tmp_path, "llama")
    model = model_size(checkpoint, torch.float32, "none", kv_cache_dtype)
    runner = SpanRunner(
        load_span(checkpoint, Span(0, 1), dtype=torch.float32), num_pages=4, page_tokens=8, attention="sdpa",
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    runner.warm_up()
    assert {block.token_bytes for block in model.blocks} == {runner.store.page_bytes // 8}


@pytest.mark.parametrize(
    "quantization, dtype",
    [("packed", torch.float32), pytest.param("none", torch.bfloat16, marks=pytest.mark.full)],
)
def test_a_gguf_files_blocks_and_ends_have_the_planned_size(quantization: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.from_pretrained(str(demo_checkpoint()))
    model = model_size(checkpoint, dtype, quantization, "auto")
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    assert [each.weight_bytes for each in model.blocks[:2]] == pytest.approx(
        [load_span(checkpoint, Span(block, block + 1), **options).nbytes for block in range(2)], rel=0.01
    )
    head = load_edges(checkpoint, has_embedding=False, **options).nbytes
    assert model.head_bytes == pytest.approx(head, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("llama", marks=pytest.mark.full)])
def test_packed_blocks_of_safetensors_have_the_planned_size(tmp_path: Path, family: str) -> None:
    folder, _ = make_packed_checkpoint(family, tmp_path, FORMATS["fp8-blocks"]())
    checkpoint = Checkpoint.from_pretrained(str(folder))
    model = model_size(checkpoint, torch.float32, "packed", "auto")
    assert [each.weight_bytes for each in model.blocks] == pytest.approx(
        held(checkpoint, quantization="packed"), rel=0.01
    )
    expanded = model_size(checkpoint, torch.float32, "none", "auto")
    assert all(
        2 * own.weight_bytes < each.weight_bytes for own, each in zip(model.blocks, expanded.blocks, strict=True)
    )


def test_quantised_blocks_have_the_planned_size_and_are_larger_while_they_are_read(
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_of(tmp_path, "llama")
    model = model_size(checkpoint, torch.float32, "int8", "auto")
    assert [each.weight_bytes for each in model.blocks] == pytest.approx(
        held(checkpoint, quantization="int8"), rel=0.02
    )
    assert [each.loading_bytes for each in model.blocks] == pytest.approx(held(checkpoint), rel=0.01)


def test_a_row_takes_the_inner_numbers_of_each_of_its_experts(tmp_path: Path) -> None:
    def row_numbers(num_chosen: int) -> int:
        changes = {"num_experts_per_tok": num_chosen, "num_local_experts": 8}
        folder = make_tiny_checkpoint("mixtral", tmp_path / str(num_chosen), config_changes=changes)
        checkpoint = Checkpoint.from_pretrained(str(folder))
        return model_size(checkpoint, torch.float32, "none", "auto").step.row_bytes // torch.float32.itemsize

    inner = 96  # the tiny models' `intermediate_size`
    assert row_numbers(5) - row_numbers(2) == 3 * 3 * inner, "gate, up and their product, of three more experts"


def test_no_weight_is_read(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    expected = model_size(Checkpoint.from_pretrained(str(folder)), torch.bfloat16, "none", "auto")
    for shard in folder.glob("*.safetensors"):
        # The table of contents stays, and holes take the place of all numbers.
        size, header = shard.stat().st_size, shard.read_bytes()
        length = int.from_bytes(header[:8], "little") + 8
        shard.unlink()
        with shard.open("wb") as file:
            file.write(header[:length])
            file.truncate(size)
    assert model_size(Checkpoint.from_pretrained(str(folder)), torch.bfloat16, "none", "auto") == expected
