"""Reads large tensors chunk by chunk into their final memory, in their final dtype.

A tensor that is read whole exists twice for a moment: in the file's dtype and in the final one. For an embedding, that
takes gigabytes more.

Transformers fills a model in the memory of the host. For a model on another device, it gets deferred tensors in place
of those that it would only rename: they have the right shape and take no memory. Once the model is filled, these are
read in chunks, in the order of the model's modules, straight into the memory of the device. Several threads read the
chunks that come next into a fixed number of buffers, since one thread copies a few gigabytes a second out of the page
cache. The buffers are reused, since the system has to clear new memory before a file can be read into it. Where the
device is a GPU, they are pinned, so the GPU copies one while others are filled.
"""

import contextlib
import functools
import io
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, InternalError
from corolla.chassis.processors import available_cores
from corolla.models.weights import StoredTensor, read_header

# The dtypes by safetensors' names, and those that models compute with.
_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_PLAIN: Final = (torch.float32, torch.float16, torch.bfloat16)
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
        is_deferred: whether indexing a large matrix reads nothing, since `read_deferred` reads it later. The result
            then has the right shape and dtype, and all its elements are one number in memory.
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
    """

    def __init__(self, file: io.FileIO, stored: StoredTensor) -> None:
        self._file = file
        self._stored = stored
        self._dtype = _DTYPES.get(stored.dtype)

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the element type."""
        return self._stored.dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Reads what is indexed, in the file's dtype, on the CPU; for `[start:end]`, only these rows."""
        shape, num_bytes = self._stored.shape, self._stored.num_bytes
        if not isinstance(index, slice) or not num_bytes:
            return self._read(0, num_bytes, new_room).view(shape)[index]
        start, end, _ = index.indices(shape[0])
        row_bytes = num_bytes // shape[0]
        return self._read(start * row_bytes, (end - start) * row_bytes, new_room).view(end - start, *shape[1:])

    def rows(self, start: int, end: int) -> "StoredMatrix":
        """Some of its rows as a tensor."""
        return StoredMatrix(self._file, self._stored.rows(start, end))

    @property
    def is_plain(self) -> bool:
        """True if the file holds the numbers of a matrix as a model does, row after row."""
        return self._dtype in _PLAIN and len(self._stored.shape) > 1

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
        return self._read(start * row_bytes, (end - start) * row_bytes, room).view(end - start, self._stored.shape[-1])

    def _read(self, start: int, num_bytes: int, room: Room) -> Tensor:
        """Reads `num_bytes` of the tensor's bytes from `start` on: numbers in the file's dtype, in one dimension."""
        if self._dtype is None:
            raise CheckpointError(
                f"{self._file.name} holds numbers of the type {self._stored.dtype}; give another one."
            )
        memory, at = room(num_bytes), 0
        target: Any = memory.numpy()
        while at < num_bytes:  # the system reads two gigabytes at most
            read = os.preadv(self._file.fileno(), [target[at:]], self._stored.offset + start + at)
            if read == 0:
                raise CheckpointError(f"{self._file.name} has become shorter; fetch the checkpoint again.")
            at += read
        return memory.view(self._dtype)


class _Rearranged:
    """A stored tensor whose numbers get another order as they are read."""

    def __init__(self, stored: StoredMatrix) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        """safetensors' name of the element type."""
        return self._stored.get_dtype()


class Transposed(_Rearranged):
    """A stored tensor whose last two dimensions are exchanged as it is read."""

    def get_shape(self) -> list[int]:
        *outer, rows, columns = self._stored.get_shape()
        return [*outer, columns, rows]

    def __getitem__(self, index: Any) -> Tensor:
        """Reads what is indexed, in the file's dtype, on the CPU; for `[start:end]`, only these of the first index."""
        if isinstance(index, slice):
            return self._stored[index].transpose(-1, -2)
        return self._stored[...].transpose(-1, -2)[index]


class HalvesOfPairs(_Rearranged):
    """A stored matrix of heads. It stores the two rows of a pair together, and gives them half a head apart."""

    def __init__(self, stored: StoredMatrix, head_size: int) -> None:
        super().__init__(stored)
        self._head_size = head_size

    def __getitem__(self, index: Any) -> Tensor:
        """Reads what is indexed, in the file's dtype, on the CPU; for `[start:end]`, only the heads of these rows."""
        size = self._head_size
        start, end, _ = (index if isinstance(index, slice) else slice(None)).indices(self.get_shape()[0])
        first, last = start // size, -(-end // size)
        heads = self._stored[first * size : last * size]
        rows = heads.view(-1, size // 2, 2, heads.shape[-1]).transpose(1, 2).reshape(heads.shape)
        return rows[start - first * size : end - first * size] if isinstance(index, slice) else rows[index]


@contextlib.contextmanager
def open_tensors(weight_index: Mapping[str, Path], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Opens some tensors for reading, under new names: `names` maps a new name to the stored one.

    A tensor is read into new memory when it is indexed. Files are not mapped, so that a process takes only the memory
    of what it has read. Only shards with a wanted tensor are opened.

    Raises:
        CheckpointError: a shard cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        shards: dict[Path, tuple[io.FileIO, dict[str, StoredTensor]]] = {}
        tensors: dict[str, Any] = {}
        for new_name, stored_name in names.items():
            path = weight_index[stored_name]
            try:
                if path not in shards:
                    shards[path] = stack.enter_context(path.open("rb", buffering=0)), read_header(path)
                file, header = shards[path]
                tensors[new_name] = StoredMatrix(file, header[stored_name])
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read; check its permissions or fetch the checkpoint again."
                ) from error
        yield tensors


BUFFER_BYTES: Final = 8 << 20
# Eight threads read faster than a GPU of today copies from the host.
_MOST_THREADS: Final = 8
# While all threads read, the device copies these.
_MORE_BUFFERS: Final = 2

ChangeModule = Callable[[nn.Module], None]
"""Changes a module of a filled model, or replaces it there, and no other one."""

Read = Callable[[Sequence[ChunkedTensor]], Generator[Tensor, None, None]]
"""Yields deferred tensors one after the other, each whole, in its own shape and dtype, on the device."""


class _Buffer:
    """Memory of the host for one chunk; it grows to the largest chunk that it gets.

    Attributes:
        copied: an event that comes after the device's copy of the last chunk; None: the memory is free.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.copied: Any = None
        self._is_pinned = is_pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def read(self, tensor: ChunkedTensor, start: int, end: int) -> Tensor:
        """Reads rows `[start, end)` as `ChunkedTensor.rows` does, into this memory, once the device has copied it."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        rows = tensor.rows(start, end, self._room)
        if not self._is_pinned or rows.data_ptr() == self._memory.data_ptr():
            return rows
        staged = self._room(rows.nbytes)
        # In numpy the copy starts no helper threads; in torch each reading thread would start its own.
        staged.numpy()[:] = rows.contiguous().view(-1).view(torch.uint8).numpy()
        return staged.view(rows.dtype).view(rows.shape)

    def _room(self, num_bytes: int) -> Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(max(BUFFER_BYTES, num_bytes), dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._memory[:num_bytes]


def read_to(
    device: torch.device,
    tensors: Sequence[ChunkedTensor],
    is_pinned: bool | None = None,
    num_threads: int | None = None,
) -> Generator[Tensor, None, None]:
    """Reads deferred tensors one after the other, while threads read ahead into buffers that are made once.

    Close the iterator before the files are closed.

    Args:
        is_pinned: whether the buffers are pinned; None: if the device is a GPU.
        num_threads: how many chunks are read at a time; None: as many as this process may use cores, up to a limit.

    Yields:
        Each tensor whole: `[rows, ...]` of its own shape, in its own dtype, on the device.

    Raises:
        CheckpointError: a file cannot be read.
    """
    is_pinned = device.type == "cuda" if is_pinned is None else is_pinned
    num_threads = num_threads or min(_MOST_THREADS, available_cores())
    # Tensors that have to be expanded take all threads of torch for one chunk.
    if not all(each.is_plain for each in tensors):
        num_threads = 1
    chunks = ((tensor, start, end) for tensor in tensors for start, end in _runs(tensor))
    buffers = [_Buffer(is_pinned) for _ in range(num_threads + _MORE_BUFFERS)]
    ahead: deque[tuple[_Buffer, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(num_threads, "weights") as threads:

        def begin(buffer: _Buffer) -> None:
            if (chunk := next(chunks, None)) is not None:
                ahead.append((buffer, threads.submit(buffer.read, *chunk)))

        try:
            for buffer in buffers:
                begin(buffer)
            for tensor in tensors:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                lines = target.view(tensor.row_shape)
                for start, end in _runs(tensor):
                    buffer, read = ahead.popleft()
                    # The dtype changes on the device, which is faster there and takes no memory of the host.
                    lines[start:end].copy_(read.result().to(device, non_blocking=is_pinned))
                    if is_pinned:
                        buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        buffer.copied.record(torch.cuda.current_stream(device))
                    begin(buffer)
                yield target
        finally:
            for _, read in ahead:
                read.cancel()


def _runs(tensor: ChunkedTensor) -> Iterator[tuple[int, int]]:
    """Yields `(start, end)` of the runs of rows that are read together."""
    num_rows, *inner = tensor.row_shape
    step = max(1, BUFFER_BYTES // max(1, math.prod(inner) * torch.float32.itemsize))
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def read_deferred(
    model: nn.Module,
    tensors: Iterable[ChunkedTensor],
    device: torch.device,
    change: ChangeModule | None = None,
    read: Read | None = None,
) -> None:
    """Reads the deferred tensors of a filled model, module by module, and moves the modules to the device.

    Args:
        model: the model; parameters share the memory of their deferred tensors.
        tensors: the tensors with which the model was filled.
        change: called with each module once its own parameters lie on the device, before the next module is read.
        read: reads the tensors; None: `read_to` does.

    Raises:
        CheckpointError: a file cannot be read.
    """
    deferred = {tensor.address: tensor for tensor in tensors if tensor.address is not None}
    modules = list(model.modules())
    # Tied parameters are one object, which several modules have; a model names it once.
    parameters = {id(each): each for module in modules for each in module.parameters(recurse=False)}
    found = {
        key: deferred[address]
        for key, parameter in parameters.items()
        if (address := parameter.untyped_storage().data_ptr()) in deferred
    }
    if missing := len(deferred) - len(set(map(id, found.values()))):
        raise InternalError(f"{missing} tensors of the checkpoint were copied before they were read")
    read = read or functools.partial(read_to, device)
    with contextlib.closing(read(list(found.values()))) as reading:
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if parameters.pop(id(parameter), None) is not None:
                    parameter.data = next(reading) if id(parameter) in found else parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
            if change is not None:
                change(module)
