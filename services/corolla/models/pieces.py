"""Large tensors, read piece by piece straight into the memory that they will have, in the type that they will have.

A file's numbers as a whole, next to the same numbers in another type, would take three times the memory for a moment:
of an embedding that is gigabytes.
"""

import contextlib
import io
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corolla.chassis.errors import CheckpointError
from corolla.models.weights import StoredTensor, read_header

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES: Final = 1 << 20


class InPieces:
    """A stored matrix as `cut_model.build` takes it: it is read when it is indexed.

    Args:
        stored: gives `[start:end]` of its first dimension, and its shape by `get_shape`; else it is read as a whole.
        dtype: of the numbers of a large one, whatever the file holds.

    Attributes:
        dtype: what it was made with; another one may be set before it is read.
    """

    def __init__(self, stored: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._stored = stored

    def __getitem__(self, index: Any) -> Tensor:
        shape = tuple(self._stored.get_shape()) if hasattr(self._stored, "get_shape") else ()
        num_bytes = math.prod(shape) * torch.float32.itemsize
        if len(shape) < 2 or num_bytes <= PIECE_BYTES:
            whole: Tensor = self._stored[index]
            return whole
        num_rows = max(1, shape[0] * PIECE_BYTES // num_bytes)
        read = torch.empty(shape, dtype=self.dtype)
        for start in range(0, shape[0], num_rows):
            end = min(start + num_rows, shape[0])
            read[start:end] = self._stored[start:end]
        return read[index]


class StoredMatrix:
    """A tensor of a shard: as a slice of safetensors, but that reads the whole tensor whatever of it is asked for.

    Args:
        whole: the slice.
        file: the shard.
        stored: where the tensor lies there.
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
        """Of `[start:end]`, only these rows are read."""
        dtype = _DTYPES.get(self._stored.dtype)
        if dtype is None or not isinstance(index, slice) or len(self._stored.shape) < 2:
            whole: Tensor = self._whole[index]
            return whole
        start, end, _ = index.indices(self._stored.shape[0])
        row_bytes = self._stored.num_bytes // self._stored.shape[0]
        rows = torch.empty((end - start, *self._stored.shape[1:]), dtype=dtype)
        target: Any = rows.view(torch.uint8).numpy()
        if os.preadv(self._file.fileno(), [target], self._stored.offset + start * row_bytes) < rows.nbytes:
            raise CheckpointError(f"{self._file.name} has become shorter; fetch the checkpoint again.")
        return rows


@contextlib.contextmanager
def open_tensors(weight_index: Mapping[str, Path], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Opens some tensors for reading, under new names: `names` maps a new name to the stored one.

    A value is read when it is indexed, into memory of its own: the file is not mapped, so that what a process holds is
    what it read. Of one that is indexed by `[start:end]`, only these rows are. Only shards with a wanted tensor are
    opened.

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
