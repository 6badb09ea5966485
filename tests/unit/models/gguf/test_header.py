"""A damaged or hostile file is refused before memory is taken, and a good one is read."""

import contextlib
import re
import shutil
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corolla.chassis.errors import CheckpointError
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.gguf.header import raw_bytes, read_header
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.gguf_files import make_tiny_gguf, rewrite_gguf

MAX_BYTES = 8 << 20


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf("llama", tmp_path_factory.mktemp("gguf"), kind="Q8_0", num_blocks=1)[1]


def test_a_header_is_what_the_package_gguf_reads(good: Path) -> None:
    header, reader = read_header(good), gguf.GGUFReader(good)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        own = header.tensors[tensor.name]
        facts = (own.type_name, own.offset, own.num_bytes, own.num_weights)
        assert facts == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes, tensor.n_elements)
    fields = [key for key in reader.fields if not key.startswith("GGUF.")]
    assert list(header.metadata) == fields
    assert header.metadata["tokenizer.ggml.tokens"] == reader.fields["tokenizer.ggml.tokens"].contents()


def refused(path: Path) -> bool:
    """Whether a file is refused as a start that failed, without much memory."""
    tracemalloc.start()
    try:
        read_header(path)
    except CheckpointError:
        return True
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_BYTES
    return False


def _numbers_of(path: Path) -> list[tuple[str, int, str]]:
    """The name, the place and the form of each dimension of a tensor and each size among the settings."""
    reader = gguf.GGUFReader(path)
    found = []
    for tensor in reader.tensors:
        at = tensor.field.offset + 8 + len(tensor.name) + 4
        found += [(f"{tensor.name} {number}", at + 8 * number, "<Q") for number in range(len(tensor.shape))]
    for key, field in reader.fields.items():
        if field.types == [gguf.GGUFValueType.UINT32] and not key.startswith(("GGUF.", "tokenizer.", "general.")):
            found.append((key, field.offset + 8 + len(key) + 4, "<I"))
    return found


def load(path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(path))
    load_span(checkpoint, Span(0, checkpoint.num_blocks), dtype=torch.float32)
    load_edges(checkpoint, dtype=torch.float32)


def test_a_size_that_no_model_has_is_refused_with_a_sentence(good: Path, tmp_path: Path) -> None:
    """One refusal comes before memory is taken: none, one, or more than the file can hold."""
    content = good.read_bytes()
    harmless = {"llama.context_length"}
    for name, place, form in _numbers_of(good):
        for value in (0, 2**31 - 1, 2**32 - 1, *((2**40, 2**63 - 1, 2**64 - 1) if form == "<Q" else ())):
            if name in harmless and value:
                continue
            damage = struct.pack(form, value)
            path = tmp_path / "odd.gguf"
            path.write_bytes(content[:place] + damage + content[place + len(damage) :])
            with pytest.raises(CheckpointError):
                load(path)


# What a size does not change: a file says it twice, or shapes say it as well, or any number is one that a model has.
HARMLESS = re.compile(
    r"context_length|rope\.|sliding_window|group|gating|softcap|nextn|full_attention|used_count|leading|interleave"
    r"|attention\.(head_count_kv|key_length|value_length)$|feed_forward_length|l_cache|shortconv|recurrent"
)


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "ernie4_5_moe", "gpt_oss", "kimi_linear", "lfm2_moe", "phi3", "qwen3_5_moe_text"]
)
def test_a_size_that_no_model_has_is_refused_in_every_kind_of_model(tmp_path: Path, family: str) -> None:
    _, path = make_tiny_gguf(family, tmp_path)
    content = path.read_bytes()
    # Blocks of one kind have the same tensors.
    unlike = {re.sub(r"blk\.\d+", "blk", name): (name, place, form) for name, place, form in _numbers_of(path)}
    for name, place, form in unlike.values():
        for value in (0, 2**31 - 1, 2**32 - 1, *((2**40, 2**64 - 1) if form == "<Q" else ())):
            damage = struct.pack(form, value)
            (tmp_path / "odd.gguf").write_bytes(content[:place] + damage + content[place + len(damage) :])
            is_harmless = bool(HARMLESS.search(name))
            with contextlib.suppress(CheckpointError) if is_harmless else pytest.raises(CheckpointError):
                load(tmp_path / "odd.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_are_refused_or_still_make_sense(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    end = min(tensor.offset for tensor in read_header(good).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, end - 8))
        damage = data.draw(st.sampled_from([b"\xff" * 8, bytes(8), b"\xff" * 4, b"\x7f", struct.pack("<Q", 1 << 62)]))
        content[position : position + len(damage)] = damage
    (tmp_path / "damaged.gguf").write_bytes(content)
    refused(tmp_path / "damaged.gguf")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_file_that_was_cut_short_is_refused(good: Path, tmp_path: Path, share: float) -> None:
    content = good.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content))])
    assert refused(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    "beginning",
    [
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 99, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 9, 1 << 40),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 1 << 62),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"a", 2, 1 << 40, 1 << 20, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q1sI", 1, b"a", 1 << 30),
        b"not a file of this kind at all, but long enough",
    ],
)
def test_a_beginning_that_promises_too_much_is_refused(tmp_path: Path, beginning: bytes) -> None:
    (tmp_path / "hostile.gguf").write_bytes(beginning + bytes(1000))
    assert refused(tmp_path / "hostile.gguf")


def test_what_else_cannot_be_read_is_said(good: Path, tmp_path: Path) -> None:
    content = good.read_bytes()
    (tmp_path / "old.gguf").write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    with pytest.raises(CheckpointError, match=r"old\.gguf has version 1 of the format; convert it to version 3"):
        read_header(tmp_path / "old.gguf")
    fewer = rewrite_gguf(good, tmp_path / "fewer.gguf", {"split.tensors.count": 99})
    with pytest.raises(CheckpointError, match=r"fewer\.gguf promises 99 tensors and has \d+; fetch the model again"):
        read_header(fewer)
    tensor = next(iter(read_header(good).tensors.values()))
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"short\.gguf has become shorter; fetch it again"):
        raw_bytes(replace(tensor, path=tmp_path / "short.gguf"), 0, tensor.num_bytes)


def test_a_type_that_is_not_served_is_named(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    place = content.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    content[place : place + 4] = struct.pack("<I", 24)
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_down.weight' in a type \(number 24\) that is not served"):
        read_header(tmp_path / "other.gguf")


@pytest.mark.parametrize("key", [b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count\x04"])
def test_a_file_that_does_not_say_how_large_its_model_is_is_refused(
    good: Path, tmp_path: Path, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    content = good.read_bytes()
    place = content.index(key)
    (tmp_path / "unsaid.gguf").write_bytes(content[:place] + b"x" + content[place + 1 :])
    with pytest.raises(CheckpointError, match="does not say the model's"):
        Checkpoint.from_pretrained(str(tmp_path / "unsaid.gguf"))


def test_a_split_model_needs_all_its_parts(good: Path, tmp_path: Path) -> None:
    first = tmp_path / "model-00001-of-00002.gguf"
    shutil.copy(good, first)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf is missing"):
        Checkpoint.from_pretrained(str(first))
    shutil.copy(good, tmp_path / "model-00002-of-00002.gguf")
    with pytest.raises(CheckpointError, match="once more"):
        Checkpoint.from_pretrained(str(first))
    # Programs that import files rename them.
    renamed = rewrite_gguf(good, tmp_path / "model-00001-of-00002-e3b56418.gguf", {"split.count": 2})
    with pytest.raises(CheckpointError, match=r"one of 2 parts of a split model, which its name does not say; give"):
        Checkpoint.from_pretrained(str(renamed))


def test_a_split_model_may_lie_in_the_cache_of_the_hub(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There each part is a link to a file whose name is its digest."""
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    rewrite_gguf(good, tmp_path / "tiny.gguf", max_tensors=6)
    revision, blobs = (
        tmp_path / "models--org--tiny" / "snapshots" / ("a" * 40),
        tmp_path / "models--org--tiny" / "blobs",
    )
    revision.mkdir(parents=True)
    blobs.mkdir()
    for number, part in enumerate(sorted(tmp_path.glob("tiny-*.gguf"))):
        blob = blobs / f"{number:064x}"
        part.rename(blob)
        (revision / part.name).symlink_to(f"../../blobs/{blob.name}")
    parts = sorted(revision.iterdir())
    assert len(parts) > 1
    for part in parts:
        checkpoint = Checkpoint.from_pretrained(str(part))
        assert checkpoint.gguf is not None
        assert checkpoint.gguf.header.tensors.keys() == read_header(good).tensors.keys()
        assert checkpoint.name == "tiny"


@pytest.mark.parametrize(
    "file, given, name",
    [
        ("x.GGUF", "My Model 7B", "x"),
        ("sha256-" + "0a" * 32, "My Model 7B", "My-Model-7B"),
        ("0a" * 32, "org/My Model", "org-My-Model"),
        ("0a" * 32, None, "0a" * 32),
    ],
)
def test_a_file_is_known_by_its_first_bytes_and_named_by_what_people_read(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, given: str | None, name: str
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    path = rewrite_gguf(good, tmp_path / file, {"general.name": given})
    assert Checkpoint.from_pretrained(str(path)).name == name


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        Checkpoint.from_pretrained(str(tmp_path / "model.bin"))
