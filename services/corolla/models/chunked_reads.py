"""Reads large tensors chunk by chunk into their final memory, in their final dtype.

A tensor that is read whole exists twice for a moment: in the file's dtype and in the final one. For an embedding, that
takes gigabytes more.
"""

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corolla.chassis.errors import CheckpointError
from corolla.models.weights import StoredTensor, read_header

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK_BYTES: Final = 1 << 20

Room = Callable[[int], Tensor]
"""Returns memory of the host for so many bytes: uint8 `[bytes]` on the CPU, contiguous."""


def new_room(num_bytes: int) -> Tensor:
    """New memory of the host: uint8 `[num_bytes]` on the CPU."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class ChunkedTensor:
    """A stored tensor for `cut_model.build` that is read when it is indexed; a large matrix is read in chunks.

    Args:
        stored: the tensor. If it has `get_shape` and can be indexed by `[start:end]`, it is read in chunks.
        dtype: the dtype of a large matrix after reading, whatever the file holds.

    Attributes:
        dtype: the argument `dtype`; it may be changed before the tensor is read.
        is_deferred: whether indexing a large matrix reads nothing, since `device_reads` reads it later. The result then
            has the right shape and dtype, and all its elements are one number in memory.
        address: the address of that number; None before it exists.
    """

    def __init__(self, stored: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.is_deferred = False
        self.address: int | None = None
        self._stored = stored
        self._stand_in: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor that tells it, else an empty one."""
        return tuple(self._stored.get_shape()) if hasattr(self._stored, "get_shape") else ()

    @property
    def is_plain(self) -> bool:
        """True if reading the numbers is only a copy, because the file stores them as they are."""
        return bool(getattr(self._stored, "is_plain", False))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape in which `rows` counts: that of a plain tensor is a matrix of all its rows."""
        shape = self.shape
        return (math.prod(shape[:-1]), shape[-1]) if self.is_plain else shape

    def rows(self, start: int, end: int, room: Room = new_room) -> Tensor:
        """Reads rows `[start, end)` of `row_shape` as `[end - start, ...]`, in the file's dtype, on the CPU.

        Args:
            room: gives memory for the rows. Stored tensors that are not plain return other memory.
        """
        read: Tensor = self._stored.lines(start, end, room) if self.is_plain else self._stored[start:end]
        return read

    def __getitem__(self, index: Any) -> Tensor:
        """Reads the numbers at `index`, on the CPU, in the shape of a torch tensor that is indexed in the same way.

        A large matrix gets the dtype of the attribute `dtype`, any other tensor keeps that of the file.
        """
        shape = self.shape
        num_bytes = math.prod(shape) * torch.float32.itemsize
        if len(shape) < 2 or num_bytes <= CHUNK_BYTES:
            whole: Tensor = self._stored[index]
            return whole
        if self.is_deferred:
            if self._stand_in is None:
                self._stand_in = torch.zeros((), dtype=self.dtype)
                self.address = self._stand_in.untyped_storage().data_ptr()
            return self._stand_in.expand(shape)[index]
        counted = self.row_shape
        num_rows = max(1, counted[0] * CHUNK_BYTES // num_bytes)
        read = torch.empty(shape, dtype=self.dtype)
        lines = read.view(counted)
        for start in range(0, counted[0], num_rows):
            end = min(start + num_rows, counted[0])
            lines[start:end] = self.rows(start, end)
        return read[index]


class StoredMatrix:
    """A tensor of a shard that has the interface of safetensors' slices, but reads only the indexed rows.

    A slice of safetensors reads the whole tensor each time.

    Args:
        whole: safetensors' slice of the whole tensor.
        stored: the tensor's place in the shard.
    """

    def __init__(self, whole: Any, file: io.FileIO, stored: StoredTensor) -> None:
        self._whole = whole
        self._file = file
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the element type."""
        return self._stored.dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Reads what is indexed, in the file's dtype, on the CPU; for `[start:end]` of a matrix, only these rows."""
        if not isinstance(index, slice) or len(self._stored.shape) < 2:
            whole: Tensor = self._whole[index]
            return whole
        start, end, _ = index.indices(self._stored.shape[0])
        if not self.is_plain:
            part: Tensor = self._whole[start:end]
            return part
        inner = math.prod(self._stored.shape[1:-1])
        return self.lines(start * inner, end * inner, new_room).view(end - start, *self._stored.shape[1:])

    @property
    def is_plain(self) -> bool:
        """True if the file holds the numbers as torch does, row after row."""
        return self._stored.dtype in _DTYPES and len(self._stored.shape) > 1

    def lines(self, start: int, end: int, room: Room) -> Tensor:
        """Reads rows `[start, end)` of a plain tensor, which count through all dimensions but the last.

        Several threads may read at the same time.

        Args:
            room: gives the memory into which the rows are read.

        Returns:
            `[end - start, columns]` in the file's dtype, on the CPU.

        Raises:
            CheckpointError: the file has become shorter.
        """
        row_bytes = self._stored.num_bytes // math.prod(self._stored.shape[:-1])
        memory = room((end - start) * row_bytes)
        target: Any = memory.numpy()
        if os.preadv(self._file.fileno(), [target], self._stored.offset + start * row_bytes) < memory.nbytes:
            raise CheckpointError(f"{self._file.name} has become shorter; fetch the checkpoint again.")
        return memory.view(_DTYPES[self._stored.dtype]).view(end - start, self._stored.shape[-1])


@contextlib.contextmanager
def open_tensors(weight_index: Mapping[str, Path], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Opens some tensors for reading, under new names: `names` maps a new name to the stored one.

    A tensor is read into new memory when it is indexed. Files are not mapped, so that a process takes only the memory
    of what it has read. Indexing by `[start:end]` reads only these rows. Only shards with a wanted tensor are opened.

    Raises:
        CheckpointError: a shard cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        shards: dict[Path, Any] = {}
        files: dict[Path, tuple[io.FileIO, dict[str, StoredTensor]]] = {}
        tensors: dict[str, Any] = {}
        for new_name, stored_name in names.items():
            path = weight_index[stored_name]
            try:
                if path not in shards:
                    shards[path] = stack.enter_context(safe_open(path, framework="pt", backend="pread"))
                    files[path] = stack.enter_context(path.open("rb", buffering=0)), read_header(path)
                file, header = files[path]
                tensors[new_name] = StoredMatrix(shards[path].get_slice(stored_name), file, header[stored_name])
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} cannot be read; check its permissions or fetch the checkpoint again."
                ) from error
        yield tensors
