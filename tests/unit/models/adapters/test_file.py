"""Reading adapters that PEFT wrote, and files that somebody made to do harm."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import AdapterError
from corolla.models.adapters.config import CONFIG_FILE
from corolla.models.adapters.file import MAX_HEADER_BYTES, WEIGHTS_FILE, digest_of, read_adapter
from corolla.models.adapters.loading import load_adapter
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import SpanModel, load_span
from corolla.wire.span import Span
from tests.adapters import make_adapter
from tests.checkpoints import make_tiny_checkpoint

NUM_BLOCKS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> SpanModel:
    return load_span(Checkpoint.from_pretrained(str(checkpoint)), Span(1, 3), dtype=torch.float32)


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(checkpoint, tmp_path / "adapter")


def test_only_what_is_wanted_is_kept_and_all_of_it_is_digested(adapter: Path) -> None:
    sizes: list[int] = []
    contents = read_adapter(adapter, lambda part: part.block == 1, sizes.append)
    assert {part.block for part in contents.parts} == {0, 1, 2}
    assert {part.block for part in contents.data} == {1}
    assert sizes == [sum(part.num_values for part in contents.data)]
    assert contents.digest == digest_of(adapter)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_each_byte_counts_in_the_digest(adapter: Path, file: str) -> None:
    before = digest_of(adapter)
    content = bytearray((adapter / file).read_bytes())
    at = content.index(b'"lora_dropout": 0.0') + len(b'"lora_dropout": 0.') if file == CONFIG_FILE else len(content) - 1
    content[at] ^= 1
    (adapter / file).write_bytes(content)
    assert digest_of(adapter) != before


def test_an_adapter_with_another_digest_is_not_loaded(adapter: Path, model: SpanModel) -> None:
    load_adapter(adapter, model, NUM_BLOCKS, digest=digest_of(adapter))
    with pytest.raises(AdapterError, match="registered"):
        load_adapter(adapter, model, NUM_BLOCKS, digest="0" * 64)


def test_sizes_are_checked_before_memory_is_taken(adapter: Path, model: SpanModel) -> None:
    def refuse(num_bytes: int) -> None:
        raise AdapterError(f"{num_bytes} are too many")

    loaded = load_adapter(adapter, model, NUM_BLOCKS)
    with pytest.raises(AdapterError, match=f"^{loaded.nbytes} are"):
        load_adapter(adapter, model, NUM_BLOCKS, check_bytes=refuse)


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint("llama", tmp_path / "m", num_blocks=2, config_changes={"intermediate_size": 128})
    span = load_span(Checkpoint.from_pretrained(str(other)), Span(0, 2), dtype=torch.float32)
    with pytest.raises(AdapterError, match="another model"):
        load_adapter(adapter, span, 2)
    with pytest.raises(AdapterError, match="other sizes"):
        load_adapter(adapter, span, NUM_BLOCKS)


def rewrite(adapter: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the table of contents and keeps the data."""
    content = (adapter / WEIGHTS_FILE).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (adapter / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def first_of(header: dict[str, Any]) -> dict[str, Any]:
    return min((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])


NAMES = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda header: first_of(header).update(shape=[2**40, 2**40]),
         "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has no shape, type and place that fit each "
         "other"),
        (lambda header: first_of(header).update(shape=[-4, -64]),
         "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has no shape, type and place that fit each "
         "other"),
        (lambda header: first_of(header).update(shape=[4.0, 64]),
         "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has no shape, type and place that fit each "
         "other"),
        (lambda header: first_of(header).update(dtype="F64"),
         "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has no shape, type and place that fit each "
         "other"),
        (lambda header: first_of(header).update(data_offsets=[0, 2**62]),
         "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has no shape, type and place that fit each "
         "other"),
        (lambda header: first_of(header).update(data_offsets=[o + 8 for o in first_of(header)["data_offsets"]]),
         "the table of contents of adapter_model.safetensors has gaps or overlaps"),
        (lambda header: first_of(header).pop("shape"),
         "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight has no shape, type and place that fit each "
         "other"),
        (lambda header: header.pop(NAMES), "the table of contents of adapter_model.safetensors has gaps or overlaps"),
        (lambda header: header.update({"../../etc/passwd": header.pop(NAMES)}),
         "../../etc/passwd is no product of a linear layer in a block"),
        (lambda header: header.update({"base_model.model.lm_head.lora_A.weight": header.pop(NAMES)}),
         "it changes embedding or head; merge it into the checkpoint, or train it on the blocks only"),
        (lambda header: header.update({NAMES.replace("weight", "lora_magnitude_vector"): header.pop(NAMES)}),
         "it is a DoRA adapter, which normalises the base weights; merge it into the checkpoint"),
        (lambda header: header.update({NAMES.replace("q_proj", "experts.0.up"): header.pop(NAMES)}),
         "it changes experts, each of which sees some of the tokens only; merge it into the checkpoint"),
        (lambda header: header.update({NAMES.replace("q_proj", "kv_b_proj"): header.pop(NAMES)}),
         "it changes kv_b_proj, whose weights are read without a call of the layer; merge it, or train it without"),
        (lambda header: header.update({NAMES.replace("q_proj", "dt_proj"): header.pop(NAMES)}),
         "it changes dt_proj, whose weights are read without a call of the layer; merge it, or train it without"),
        (lambda header: header.update({f"_orig_mod.{NAMES}": header.pop(NAMES)}),
         "its names have the beginning of a wrapper (torch.compile or DDP); save it from the model without that"),
        (lambda header: header.clear(),
         "adapter_model.safetensors is cut short, or longer than its table of contents says"),
    ],
)  # fmt: skip
def test_hostile_tables_of_contents_are_refused(
    adapter: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    rewrite(adapter, change)
    with pytest.raises(AdapterError) as refused:
        digest_of(adapter)
    assert refused.value.message == sentence


@pytest.mark.parametrize(
    "content",
    [
        b"", b"abc", struct.pack("<Q", 2**63), struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * 100,
        struct.pack("<Q", 50) + b"{}", struct.pack("<Q", 4) + b"null", struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(adapter: Path, content: bytes) -> None:
    (adapter / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(AdapterError):
        digest_of(adapter)


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_file_that_is_cut_short_is_refused(adapter: Path, cut: int) -> None:
    content = (adapter / WEIGHTS_FILE).read_bytes()
    (adapter / WEIGHTS_FILE).write_bytes(content[:-cut])
    with pytest.raises(AdapterError, match="cut short"):
        digest_of(adapter)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(adapter: Path, file: str) -> None:
    (adapter / file).unlink()
    with pytest.raises(AdapterError, match=file):
        digest_of(adapter)


def test_weights_that_are_no_numbers_are_refused(adapter: Path, model: SpanModel) -> None:
    content = bytearray((adapter / WEIGHTS_FILE).read_bytes())
    content[-4:] = struct.pack("<f", float("nan"))
    (adapter / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(AdapterError, match="not finite"):
        load_adapter(adapter, model, NUM_BLOCKS)


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"use_dora": True}, "it is a DoRA adapter, which normalises the base weights; merge it into the checkpoint"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules (modules_to_save); merge it into the checkpoint"),
        ({"target_modules": ["q_proj", "embed_tokens"]},
         "it changes embedding or head; merge it into the checkpoint, or train it on the blocks only"),
        ({"target_modules": ["lm_head"]},
         "it changes embedding or head; merge it into the checkpoint, or train it on the blocks only"),
        ({"bias": "lora_only"}, "it changes biases (bias); train it with bias='none'"),
    ],
)  # fmt: skip
def test_kinds_that_peft_writes_and_that_are_not_served(
    checkpoint: Path, tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    folder = make_adapter(checkpoint, tmp_path / "adapter", **config)
    with pytest.raises(AdapterError) as refused:
        digest_of(folder)
    assert refused.value.message == sentence
