"""Reads safetensors shards' tables of contents, and short samples of their tensors."""

import contextlib
import json
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from corolla.chassis.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Mistral's own names of the two.
CONSOLIDATED_FILE = "consolidated.safetensors"
CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"
GGUF_SUFFIX = ".gguf"
PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})

_HEADER_LENGTH = struct.Struct("<Q")
_MOST_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a shard.

    Attributes:
        dtype: safetensors' name of the element type, such as `BF16`.
        shape: its dimensions.
        offset: the position of its first byte in the file.
        num_bytes: its length in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def rows(self, start: int, end: int) -> "StoredTensor":
        """Some of the first dimension; all of it if it has fewer."""
        count = self.shape[0] if self.shape else 1
        start, end = min(start, count), min(end, count)
        row_bytes = self.num_bytes // max(1, count)
        shape = (end - start, *self.shape[1:])
        return StoredTensor(self.dtype, shape, self.offset + start * row_bytes, (end - start) * row_bytes)

    def transposed(self) -> "StoredTensor":
        """The same bytes with the last two dimensions exchanged."""
        *outer, rows, columns = self.shape
        return StoredTensor(self.dtype, (*outer, columns, rows), self.offset, self.num_bytes)


def find_weights(folder: Path) -> dict[str, Path]:
    """Maps each tensor's name to the shard that holds it.

    A single file takes precedence over an index, which an earlier `save_pretrained` may have left behind; transformers
    has the same order.

    Raises:
        CheckpointError: the folder has no safetensors, or a shard or tensor of the index is missing or damaged.
    """
    single_name, index_name = weight_files([path.name for path in folder.iterdir()])
    single = folder / single_name
    if (folder / index_name).is_file() and not single.is_file():
        named = read_index(folder, index_name)
        return {**_check_shards(named, index_name), **named}
    shards = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(no_weights(str(folder), [path.name for path in folder.iterdir()]))
    if len(shards) > 1:
        raise CheckpointError(
            f"{folder} holds {len(shards)} safetensors files but no {INDEX_FILE}; fetch the missing index file."
        )
    return dict.fromkeys(read_header(shards[0]), shards[0])


def weight_files(names: Collection[str]) -> tuple[str, str]:
    """Returns the names that a single file of weights and an index have among the names of a model's files."""
    pairs = (SINGLE_FILE, INDEX_FILE), (CONSOLIDATED_FILE, CONSOLIDATED_INDEX)
    return next((pair for pair in pairs if not set(pair).isdisjoint(names)), pairs[0])


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """Reads a shard's table of contents; no tensor is read.

    Raises:
        CheckpointError: the file is missing, cut short or not a safetensors file.
    """
    try:
        # Opening checks that the table of contents is sound and covers the file to its last byte.
        # numpy is installed wherever a tokenizer is; torch only in processes that compute.
        with safe_open(shard, framework="numpy"):
            pass
        with shard.open("rb") as file:
            (num_header_bytes,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
            entries = json.loads(file.read(num_header_bytes))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{shard} is damaged or cut short; delete it and fetch the checkpoint again.") from error
    start = _HEADER_LENGTH.size + num_header_bytes
    return {
        name: StoredTensor(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=start + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def sample_bytes(weight_index: Mapping[str, Path], num_bytes: int) -> Iterator[bytes]:
    """Yields bytes that identify the tensors, in the order of their names, without reading all of each tensor.

    For each tensor, these are its name, dtype and shape, and `num_bytes` from each of its beginning, middle and end.
    They do not depend on how tensors are distributed over shards.
    """
    headers = {shard: read_header(shard) for shard in set(weight_index.values())}
    with contextlib.ExitStack() as stack:
        files = {shard: stack.enter_context(shard.open("rb")) for shard in headers}
        for name in sorted(weight_index):
            shard = weight_index[name]
            tensor = headers[shard][name]
            yield f"{name} {tensor.dtype} {tensor.shape}\n".encode()
            last = max(0, tensor.num_bytes - num_bytes)
            for offset in (0, last // 2, last):
                yield os.pread(files[shard].fileno(), min(num_bytes, tensor.num_bytes), tensor.offset + offset)


def read_index(folder: Path, name: str = INDEX_FILE) -> dict[str, Path]:
    """Maps each tensor's name to the shard of `folder` that the index names, whether the shard exists or not.

    Raises:
        CheckpointError: the index is damaged, or names a file that lies elsewhere.
    """
    index_path = folder / name
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): folder / str(file) for name, file in weight_map.items()}
        if max((len(shard.name.encode()) for shard in named.values()), default=0) > _MOST_NAME_BYTES:
            raise ValueError("a name that no file has")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index_path} is damaged; fetch the checkpoint again.") from error
    stray = next((shard for shard in named.values() if shard.parent != folder), None)
    if stray is not None:
        raise CheckpointError(f"{index_path} names a file outside its folder; fetch a checkpoint that you trust.")
    return named


def no_weights(place: str, files: Iterable[str]) -> str:
    """The error message for a place whose `files` do not include safetensors weights."""
    files = list(files)
    # A file with such a name only sees or hears, and lies next to the model's.
    stored = (name for name in files if Path(name).suffix.lower() == GGUF_SUFFIX)
    if gguf := sorted(stored, key=lambda name: ("mmproj" in Path(name).name.lower(), name)):
        return f"{place} holds GGUF files, and a GGUF file is given by its own name; give {place}/{gguf[0]}."
    pickled = sorted(name for name in files if Path(name).suffix in PICKLED_SUFFIXES)
    if pickled:
        return (
            f"{place} holds only pickled weights ({pickled[0]}), which can run code when loaded; convert them to "
            "safetensors with `save_pretrained` on a machine that you can lose, or take a revision with safetensors."
        )
    return f"{place} holds no safetensors weights; point to a complete checkpoint folder."


def _check_shards(named: Mapping[str, Path], index_name: str) -> dict[str, Path]:
    """Checks that shards hold the tensors that an index names. Returns all tensors of the shards.

    transformers also reads a tensor that only a shard names.
    """
    found: dict[str, Path] = {}
    for shard in sorted(set(named.values())):
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing although {index_name} names it; fetch the checkpoint again.")
        held = read_header(shard)
        absent = next((name for name, path in named.items() if path == shard and name not in held), None)
        if absent is not None:
            raise CheckpointError(
                f"{shard} lacks the tensor {absent} that {index_name} names; fetch the checkpoint again."
            )
        found |= dict.fromkeys(held, shard)
    return found
