"""A machine that lacks a model's files opens it and loads a span from the parts that others give it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from corolla.chassis.errors import CheckpointError
from corolla.models import checkpoint as checkpoints
from corolla.models.checkpoint import Checkpoint
from corolla.models.gguf.header import GgufHeader, GgufTensor, raw_bytes
from corolla.models.hub import Hub
from corolla.models.manifest_maker import make_manifest
from corolla.models.model_manifest import PART_BYTES, ModelManifest, PartNumber
from corolla.models.read_ahead import tensors_of
from corolla.models.shared_files import SharedFiles
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.hub_server import REPOSITORY, HubServer

CHECKSUM = "0" * 64
SOUND: dict[str, Any] = {
    "root": "tiny",
    "identity": CHECKSUM,
    "files": [
        {"name": "config.json", "num_bytes": 20, "num_head_bytes": 20, "checksums": CHECKSUM},
        {"name": "additional_chat_templates/tool.jinja", "num_bytes": 0, "num_head_bytes": 0, "checksums": ""},
    ],
}


class Copies:
    """Gives parts of the files of one machine to another, and counts them."""

    def __init__(self, checkpoint: Checkpoint, state: Path) -> None:
        path = make_manifest(checkpoint, state)
        assert path is not None
        self.content = path.read_bytes()
        self.manifest = ModelManifest.parse(self.content)
        self._whole = SharedFiles(self.manifest, self.content, checkpoint.files_folder)
        self.numbers: list[PartNumber] = []

    def files(self, folder: Path) -> SharedFiles:
        files = SharedFiles(self.manifest, self.content, folder, self._get)
        files.fetch_heads()
        return files

    def _get(self, files: SharedFiles, numbers: Sequence[PartNumber]) -> None:
        for number in numbers:
            content = self._whole.read(number)
            assert content is not None
            assert files.take(number, content)
        self.numbers += numbers


def test_a_span_of_a_gguf_file_is_loaded_from_its_parts_alone(tmp_path: Path) -> None:
    whole, span = Checkpoint.from_pretrained("demo"), Span(10, 11)
    copies = Copies(whole, tmp_path / "state")
    files = copies.files(tmp_path / "there")
    checkpoint = Checkpoint.from_pretrained(str(files.path), shared=files)
    assert checkpoint.fingerprint("float32") == whole.fingerprint("float32")
    assert checkpoint.fingerprint_parts("float32") == whole.fingerprint_parts("float32")
    checkpoint.fetch(tensors_of(checkpoint, span))
    (file,) = copies.manifest.files
    assert len(copies.numbers) == len(set(copies.numbers)) < file.num_parts / 4
    weights = [
        [each for module in load_span(source, span, dtype=torch.float32).modules() for each in module.parameters(False)]
        for source in (whole, checkpoint)
    ]
    for mine, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_factors_of_a_rotary_embedding_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a GGUF file are found with them, so they are fetched before its weights."""
    whole = Checkpoint.from_pretrained("demo")
    assert whole.gguf is not None
    files = Copies(whole, tmp_path / "state").files(tmp_path / "there")
    start = files.path.stat().st_size - 16
    factors = GgufTensor(files.path, (4,), 0, start, 16)
    header = replace(whole.gguf.header, tensors={**whole.gguf.header.tensors, "rope_freqs.weight": factors})
    found: list[bytes] = []

    def settings_folder(header: GgufHeader) -> Path:
        found.append(raw_bytes(header.tensors["rope_freqs.weight"], 0, 16))
        raise CheckpointError("that is enough")

    monkeypatch.setattr(checkpoints, "read_header_of_gguf", lambda path: header)
    monkeypatch.setattr(checkpoints, "settings_folder", settings_folder)
    with pytest.raises(CheckpointError, match="enough"):
        Checkpoint.from_pretrained(str(files.path), shared=files)
    assert found == [raw_bytes(replace(factors, path=whole.gguf.path), 0, 16)] != [bytes(16)]


@pytest.mark.full
def test_another_start_reads_what_is_there_and_gets_what_is_damaged(tmp_path: Path) -> None:
    whole = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "tiny")))
    copies = Copies(whole, tmp_path / "state")
    for _ in range(2):
        files = copies.files(tmp_path / "there" / "tiny")
        checkpoint = Checkpoint.from_pretrained(str(files.path), shared=files)
        checkpoint.fetch()
    assert checkpoint.fingerprint("float32") == whole.fingerprint("float32")
    assert len(copies.numbers) == sum(file.num_parts for file in copies.manifest.files)
    damaged = next(iter(checkpoint.weight_index.values()))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    files = copies.files(tmp_path / "there" / "tiny")
    Checkpoint.from_pretrained(str(files.path), shared=files).fetch()
    assert damaged.read_bytes() == (tmp_path / "tiny" / damaged.name).read_bytes()


@pytest.mark.full
def test_a_machine_that_fetches_gives_only_what_it_has_checked(tmp_path: Path) -> None:
    whole = Checkpoint.from_pretrained("demo")
    copies = Copies(whole, tmp_path / "state")
    files = copies.files(tmp_path / "there")
    last = PartNumber(1, copies.manifest.files[0].num_parts - 1)
    assert files.read(PartNumber(1, 0)) == whole.files_folder.joinpath(files.path.name).open("rb").read(PART_BYTES)
    assert files.read(last) is None
    assert files.read(PartNumber(0, 0)) == copies.content[:PART_BYTES]
    assert not files.take(last, bytes(PART_BYTES))
    assert files.read(last) is None
    assert not files.has(PartNumber(1, last.part + 1))
    assert not files.has(PartNumber(2**32 - 1, 0))
    assert not files.has(PartNumber(0, 2**32 - 1))


def test_checksums_are_computed_again_only_where_files_have_changed(tmp_path: Path) -> None:
    folder, state = make_tiny_checkpoint("llama", tmp_path / "tiny"), tmp_path / "state"
    first = make_manifest(Checkpoint.from_pretrained(str(folder)), state)
    assert first is not None
    first.write_bytes(b"is not made again")
    assert make_manifest(Checkpoint.from_pretrained(str(folder)), state) == first
    assert first.read_bytes() == b"is not made again"
    (folder / "generation_config.json").write_text("{}")
    assert make_manifest(Checkpoint.from_pretrained(str(folder)), state) not in (None, first)


def test_a_model_of_the_hub_has_its_name_and_fingerprint_on_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer(make_tiny_checkpoint("llama", tmp_path / "served")) as server:
        whole = Checkpoint.from_pretrained(REPOSITORY, hub=Hub(cache=tmp_path / "cache", endpoint=server.url))
        whole.fetch()
    files = Copies(whole, tmp_path / "state").files(tmp_path / "there" / REPOSITORY)
    checkpoint = Checkpoint.from_pretrained(str(files.path), shared=files)
    assert (checkpoint.name, checkpoint.fingerprint("float32")) == (REPOSITORY, whole.fingerprint("float32"))
    checkpoint.fetch()
    for shard in set(whole.weight_index.values()):
        assert (files.path / shard.name).read_bytes() == shard.read_bytes()


def test_a_gated_model_of_the_hub_is_shared_only_if_its_owner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with HubServer(make_tiny_checkpoint("llama", tmp_path / "served")) as server:
        server.token = "secret"
        whole = Checkpoint.from_pretrained(REPOSITORY, hub=Hub(cache=tmp_path / "cache", endpoint=server.url))
        whole.fetch()
    assert make_manifest(whole, tmp_path / "state") is None
    # The same files by their path in the cache, and those that another tool has put there.
    assert make_manifest(Checkpoint.from_pretrained(str(whole.folder)), tmp_path / "state") is None
    other = make_tiny_checkpoint("llama", tmp_path / "models--owner--tiny" / "snapshots" / "0123")
    assert make_manifest(Checkpoint.from_pretrained(str(other)), tmp_path / "state") is None
    assert make_manifest(whole, tmp_path / "state", shares_gated=True) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files[0].update(name="../config.json"),
        lambda files: files[0].update(name="/etc/passwd"),
        lambda files: files[0].update(name=".hidden"),
        lambda files: files[0].update(name="a/b/c.json"),
        lambda files: files[0].update(name="a/../b"),
        lambda files: files[0].update(name="a\0b"),
        lambda files: files[0].update(name="x" * 256),
        lambda files: files[0].update(name=""),
        lambda files: files[0].update(name=files[1]["name"]),
        lambda files: files[0].update(num_bytes=-1),
        lambda files: files[0].update(num_bytes=2**63, num_head_bytes=0),
        lambda files: files[0].update(num_head_bytes=21),
        lambda files: files[0].update(num_head_bytes=-1),
        lambda files: files[0].update(num_bytes=PART_BYTES + 1),
        lambda files: files[0].update(checksums=CHECKSUM + "0"),
        lambda files: files.clear(),
        lambda files: files.extend({**SOUND["files"][0], "name": str(each)} for each in range(4096)),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(change: Callable[[list[dict[str, Any]]], None]) -> None:
    assert ModelManifest.parse(json.dumps(SOUND).encode()).is_folder
    broken = json.loads(json.dumps(SOUND))
    change(broken["files"])
    with pytest.raises(CheckpointError, match="manifest"):
        ModelManifest.parse(json.dumps(broken).encode())


@pytest.mark.parametrize("root", ["..", "", "a/b/c", "a/..", "a//b", "/", "."])
def test_a_manifest_names_a_folder_below_its_own(root: str) -> None:
    with pytest.raises(CheckpointError, match="manifest"):
        ModelManifest.parse(json.dumps({**SOUND, "root": root}).encode())
