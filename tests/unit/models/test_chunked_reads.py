"""Large tensors are read in chunks, and are bit for bit what they are as a whole."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.loading import MOST_PEAK, MOST_RESIDENT, loaded
from corolla.chassis.errors import CheckpointError
from corolla.models import chunked_reads
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import ChunkedTensor, open_tensors
from corolla.models.demo import DEMO_MODEL
from corolla.models.edges import load_edges
from corolla.models.empty_model import model_class_of
from corolla.models.families import FAMILIES
from corolla.models.loading import LOADING
from corolla.models.span_model import load_span
from corolla.models.weights import find_weights
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import PACKED_FAMILIES, make_tiny_gguf
from tests.tiers import covering
from tests.unpacked import unpacked_demo


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 7, 100])
def test_a_matrix_of_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, wanted: torch.dtype, num_rows: int
) -> None:
    monkeypatch.setattr(chunked_reads, "CHUNK_BYTES", 8 * 5 * 4)  # eight rows
    tensors = {"first": torch.randn(3), "matrix": torch.randn(num_rows, 5).to(stored), "cube": torch.randn(9, 2, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with open_tensors(find_weights(tmp_path), {name: name for name in tensors}) as opened:
        for name in ("matrix", "cube"):
            assert torch.equal(ChunkedTensor(opened[name], wanted)[...].to(wanted), tensors[name].to(wanted))
        assert torch.equal(ChunkedTensor(opened["first"], wanted)[...], tensors["first"])
        assert torch.equal(opened["matrix"][num_rows // 2 : num_rows], tensors["matrix"][num_rows // 2 :])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_read_straight_into_the_memory_that_is_given(tmp_path: Path, stored: torch.dtype) -> None:
    matrix = torch.randn(9, 5).to(stored)
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    memory = torch.zeros(1000, dtype=torch.uint8)
    with open_tensors(find_weights(tmp_path), {"matrix": "matrix"}) as opened:
        tensor = ChunkedTensor(opened["matrix"], stored)
        for start, end in ((0, 9), (2, 4), (8, 9)):
            rows = tensor.rows(start, end, lambda num_bytes: memory[:num_bytes])
            assert torch.equal(rows, matrix[start:end])
            assert (rows.data_ptr() == memory.data_ptr()) == tensor.is_plain
        assert tensor.is_plain == (stored != torch.float64)


def test_a_shard_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    save_file({"matrix": torch.randn(100, 5)}, tmp_path / "model.safetensors")
    with open_tensors(find_weights(tmp_path), {"matrix": "matrix"}) as opened:
        with (tmp_path / "model.safetensors").open("r+b") as shard:
            shard.truncate(500)
        with pytest.raises(CheckpointError, match="has become shorter"):
            opened["matrix"][90:100]


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_a_model_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    assert_same_in_chunks(Checkpoint.from_pretrained(str(make_tiny_gguf(family, tmp_path)[1])), monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "bloom"])
def test_a_model_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family, num_blocks=4)
    assert_same_in_chunks(Checkpoint.from_pretrained(str(folder)), monkeypatch)


def assert_same_in_chunks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def states() -> list[torch.Tensor]:
        span = load_span(checkpoint, Span(1, 3), dtype=torch.bfloat16)
        head = load_edges(checkpoint, dtype=torch.bfloat16).modules[1]
        return [*(each for module in span.modules() for each in module.parameters(recurse=False)), *head.parameters()]

    whole = states()
    monkeypatch.setattr(chunked_reads, "CHUNK_BYTES", 1000)
    in_chunks = states()
    assert all(torch.equal(one, other) for one, other in zip(whole, in_chunks, strict=True))


# Those that name modules which stay in float32, and one whose routers are made so.
_WIDE_FAMILIES = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "hunyuan_v1_moe", "hy_v3", "kolibri1",
    "longcat_flash", "mimo_v2_flash", "nemotron_h", "solar_open",
)  # fmt: skip


def test_families_that_keep_modules_in_float32_are_known() -> None:
    named = set()
    for family in FAMILIES:
        config = CONFIG_MAPPING[family]()
        model_class: Any = model_class_of(AutoModelForCausalLM, config)
        if model_class._keep_in_fp32_modules or model_class._keep_in_fp32_modules_strict:
            named.add(family)
    assert named == set(_WIDE_FAMILIES) - {"hunyuan_v1_moe"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", _WIDE_FAMILIES)
def test_what_a_family_keeps_in_float32_is_read_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(chunked_reads, "CHUNK_BYTES", 100)
    folder = make_tiny_checkpoint(family, tmp_path / family, num_blocks=4)
    library: Any = AutoModelForCausalLM
    with LOADING:
        unsplit = library.from_pretrained(folder, dtype=dtype)
    span = load_span(Checkpoint.from_pretrained(str(folder)), Span(0, 4), dtype=dtype)
    base = next(iter(span.modules()))
    layers = FAMILIES[family].layers
    found, expected = (each.get_submodule(layers).state_dict() for each in (base, unsplit.base_model))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        own = expected[name]
        if name.endswith("experts.gate_up_proj"):
            own = own[: len(tensor)]  # transformers has weights for experts that pass their input on
        assert tensor.dtype == own.dtype, name
        assert torch.equal(tensor, own), name
    is_wide = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    # What is not named strictly stays in float32 beside float16 only.
    assert is_wide or (family in ("afmoe", "gpt_oss", "longcat_flash") and dtype == torch.bfloat16)


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.full
@pytest.mark.parametrize(
    "part, source, dtype",
    covering(["blocks 0:15", "embedding", "head"], ["safetensors", "GGUF"], ["float32", "bfloat16"]),
)
def test_loading_takes_little_more_than_what_is_loaded(part: str, source: str, dtype: str) -> None:
    model = DEMO_MODEL if source == "GGUF" else str(unpacked_demo())
    facts = loaded(model, part, dtype)
    assert facts["peak"] < MOST_PEAK * facts["held"]
    assert facts["resident"] < MOST_RESIDENT * facts["held"]
