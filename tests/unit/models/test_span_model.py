"""A span holds its own tensors and nothing else."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from corolla.chassis.errors import CheckpointError
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import edge_tensors
from corolla.models.families import num_blocks
from corolla.models.span_model import load_span, make_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.families import family_cases

# Prints by how many bytes loading `span` raised this process's peak; a first load takes what every load takes.
MEASURE_PEAK = """
import pathlib, sys, torch
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

checkpoint = Checkpoint.from_pretrained(sys.argv[1])
load_span(checkpoint, Span(29, 30), dtype=torch.float32)
before = peak()
model = load_span(checkpoint, Span.parse(sys.argv[2]), dtype=torch.float32)
print(peak() - before, model.nbytes)
"""

# The same for a block with made-up weights in bfloat16.
MEASURE_MAKING_UP = """
import pathlib, sys, torch
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import make_span
from corolla.wire.span import Span

def now(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition(name + ":")[2].split()[0]) * 1024

checkpoint = Checkpoint.from_pretrained(sys.argv[1])
make_span(checkpoint, Span(0, 1), dtype=torch.bfloat16)
before = now("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")
model = make_span(checkpoint, Span(1, 2), dtype=torch.bfloat16)
print(now("VmHWM") - before, model.nbytes)
"""


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What transformers says about how tensors fitted, for each model that is filled."""
    reports: list[Mapping[str, Any]] = []
    load: Any = PreTrainedModel.from_pretrained

    def load_and_keep(model_class: type[PreTrainedModel], *arguments: Any, **options: Any) -> tuple[Any, Any]:
        model, report = load.__func__(model_class, *arguments, **options)
        reports.append(report)
        return model, report

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load_and_keep))
    return reports


@pytest.mark.parametrize("family", family_cases())
def test_spans_share_out_the_blocks(tmp_path: Path, reports: list[Mapping[str, Any]], family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=4)))
    whole = load_span(checkpoint, Span(0, 4), dtype=torch.float32)
    parts = [load_span(checkpoint, span, dtype=torch.float32) for span in (Span(0, 3), Span(3, 4))]
    assert [num_blocks(part.config) for part in parts] == [3, 1]
    hidden = torch.randn(1, 20, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    position_ids = torch.arange(20)[None]
    expected = whole.forward(hidden, position_ids)
    for part in parts:
        hidden = part.forward(hidden, position_ids)
    assert torch.equal(hidden, expected)
    assert len(reports) == 3
    for report in reports:
        assert [report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]


@pytest.mark.parametrize("family", family_cases(every=False))
def test_a_span_is_made_up_without_reading_weights(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=2)))
    hidden = torch.randn(1, 20, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
    real = load_span(checkpoint, Span(0, 1), dtype=torch.bfloat16)
    for shard in set(checkpoint.weight_index.values()):
        shard.unlink()
    before = torch.get_rng_state()
    made_up = make_span(checkpoint, Span(0, 1), dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before), "others in this process draw, too"
    assert (made_up.nbytes, made_up.dtype) == (real.nbytes, real.dtype)
    output = made_up.forward(hidden.bfloat16(), torch.arange(20)[None])
    assert output.isfinite().all()


def add_empty_experts(folder: Path, num_experts: int, width: int, hidden_size: int) -> None:
    """Adds a file with bfloat16 experts of the second block, which takes no room on the disk."""
    num_bytes = 2 * width * hidden_size
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    header: dict[str, Any] = {}
    for expert in range(num_experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = [hidden_size, width] if name == "down_proj" else [width, hidden_size]
            start = len(header) * num_bytes
            tensor = f"model.layers.1.mlp.experts.{expert}.{name}.weight"
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, start + num_bytes]}
            index["weight_map"][tensor] = "experts.safetensors"
    index_path.write_text(json.dumps(index))
    text = json.dumps(header).encode()
    with (folder / "experts.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(header) * num_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.full
def test_a_block_is_made_up_in_little_more_than_its_own_memory(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("deepseek_v3", tmp_path / "model", num_blocks=2)
    settings = json.loads((folder / "config.json").read_text())
    # The second block has experts in a file of holes, of which nothing is read.
    large = {"first_k_dense_replace": 1, "n_routed_experts": 64, "moe_intermediate_size": 16384}
    (folder / "config.json").write_text(json.dumps({**settings, **large}))
    add_empty_experts(folder, 64, 16384, settings["hidden_size"])
    command = [sys.executable, "-c", MEASURE_MAKING_UP, str(folder)]
    printed = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=120)
    grown, held = (int(number) for number in printed.stdout.split())
    assert held > 350 << 20
    assert grown < held + (48 << 20)


def test_rows_of_made_up_weights_differ(tmp_path: Path) -> None:
    """Otherwise a router would find all experts alike, and rows would all go to the same few."""
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model", num_blocks=2)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_experts": 256, "moe_intermediate_size": 128}))
    checkpoint = Checkpoint.from_pretrained(str(folder))
    model = make_span(checkpoint, Span(0, 1), dtype=torch.bfloat16)
    for weight in (each for module in model.modules() for each in module.parameters(recurse=False)):
        if weight.dim() > 1:
            assert len(torch.unique(weight.flatten(0, -2), dim=0)) == weight.flatten(0, -2).shape[0]


def test_blocks_behind_those_of_the_configuration_are_left(tmp_path: Path) -> None:
    """They predict further tokens, and lie among the blocks in the files, or in a list of their own."""
    folder = make_tiny_checkpoint("deepseek_v3", tmp_path / "model", num_blocks=4)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 3}))
    checkpoint = Checkpoint.from_pretrained(str(folder))
    assert any(".layers.3." in name for name in checkpoint.weight_index)
    more = {f"mtp.layers.0.part_{number}.weight": folder for number in range(200)}
    assert dataclasses.replace(checkpoint, shards={**checkpoint.weight_index, **more}).largest_block == 2
    assert checkpoint.num_blocks == len(load_span(checkpoint, Span(0, 3), dtype=torch.float32).span)
    assert not any(".layers." in name for name in edge_tensors(checkpoint).values())


def test_only_the_spans_shards_are_opened(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama", num_blocks=12)))
    needed = {shard for name, shard in checkpoint.weight_index.items() if name.startswith("model.layers.7.")}
    others = set(checkpoint.weight_index.values()) - needed
    assert others
    for shard in others:
        shard.unlink()
    assert load_span(checkpoint, Span(7, 8), dtype=torch.float32).nbytes > 0
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_span(checkpoint, Span(0, 12), dtype=torch.float32)


def test_weights_are_kept_in_the_dtype_asked_for(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama")))
    full, half = (load_span(checkpoint, Span(1, 3), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert half.nbytes < 0.6 * full.nbytes


def test_blocks_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama", num_blocks=2)))
    with pytest.raises(CheckpointError, match="has 2 blocks, so it has no span 1:3; ask for blocks within 0:2"):
        load_span(checkpoint, Span(1, 3), dtype=torch.float32)


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.full
def test_memory_is_proportional_to_the_span() -> None:
    for span in ("0:8", "0:24"):
        command = [sys.executable, "-c", MEASURE_PEAK, "demo", span]
        printed = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=120)
        grown, held = (int(number) for number in printed.stdout.split())
        assert 0.7 * held < grown < 1.3 * held
