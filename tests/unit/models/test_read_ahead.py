"""The files of a span's tensors are in the system's cache before they are loaded, and no other tensors' are."""

import ctypes
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.read_ahead import ReadAhead, parts_of, tensors_of
from corolla.models.span_model import load_span
from corolla.models.weights import find_weights
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

TENSOR_BYTES = 8 << 20
PAGES = TENSOR_BYTES // mmap.PAGESIZE


@pytest.fixture
def index(tmp_path: Path) -> dict[str, Path]:
    """A file of four tensors of 8 MiB, hardly a part of which is in the system's cache."""
    file = tmp_path / "model.safetensors"
    save_file({name: torch.full((TENSOR_BYTES,), 1, dtype=torch.uint8) for name in "abcd"}, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return find_weights(tmp_path)


def cached_pages(file: Path, start: int, end: int) -> int:
    """How many whole pages of a part of a file are in the system's cache."""
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as memory,
    ):
        pages = (ctypes.c_ubyte * (-(-len(memory) // mmap.PAGESIZE)))()
        library = ctypes.CDLL(None, use_errno=True)
        view = torch.frombuffer(memory, dtype=torch.uint8)
        address = ctypes.c_void_p(view.data_ptr())
        assert library.mincore(address, ctypes.c_size_t(len(memory)), pages) == 0
        del view
        return sum(each & 1 for each in pages[-(-start // mmap.PAGESIZE) : end // mmap.PAGESIZE])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_a_server_loads_is_read_ahead_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family)))
    loaded: set[str] = set()
    open_tensors = Checkpoint.open_tensors

    def opened(self: Checkpoint, names: Mapping[str, str], dtype: Any = None) -> Any:
        loaded.update(names.values())
        return open_tensors(self, names, dtype)

    monkeypatch.setattr(Checkpoint, "open_tensors", opened)
    last = checkpoint.num_blocks - 1
    for span in (Span(0, 1), Span(1, 2), Span(last, last + 1)):
        loaded.clear()
        load_span(checkpoint, span, dtype=torch.float32)
        has_embedding, has_head = span.start == 0, span.end == checkpoint.num_blocks
        if has_embedding or has_head:
            load_edges(checkpoint, dtype=torch.float32, has_embedding=has_embedding, has_head=has_head)
        assert set(tensors_of(checkpoint, span)) == loaded


def test_neighbours_are_one_part(index: dict[str, Path]) -> None:
    (file,) = set(index.values())
    (first, second) = parts_of(index, ["d", "a", "b"])[file]
    assert (first[1] - first[0], second[1] - second[0]) == (2 * TENSOR_BYTES, TENSOR_BYTES)
    assert parts_of({**index, "e": file.with_name("absent")}, ["e"]) == {}


def test_tensors_are_in_the_cache_once_they_are_read_ahead(index: dict[str, Path]) -> None:
    (file,) = set(index.values())
    (part,) = parts_of(index, ["c", "d"])[file]
    if cached_pages(file, *part) > PAGES:
        pytest.skip("this file system keeps its files in memory")
    ReadAhead(index, ["c", "d"]).wait()
    assert cached_pages(file, *part) >= 2 * PAGES - 1


def test_reading_ahead_ends_silently_and_fills_no_more_than_half_of_the_memory(index: dict[str, Path]) -> None:
    (file,) = set(index.values())
    (part,) = parts_of(index, ["c", "d"])[file]
    is_in_memory = cached_pages(file, *part) > PAGES
    ReadAhead(index, ["c", "d"], available_bytes=TENSOR_BYTES).wait()
    # The system itself reads some pages after the header along.
    assert is_in_memory or cached_pages(file, *part) < PAGES
    file.write_bytes(b"damaged")
    damaged = ReadAhead(index, ["c"])
    damaged.wait()
    damaged.stop()
