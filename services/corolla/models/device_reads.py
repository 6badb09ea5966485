"""Reads stored tensors straight into the memory of a device, so that no tensor lies whole in the memory of the host.

Transformers fills a model in the memory of the host. For tensors that it would only rename, it gets deferred ones,
which have the right shape and take no memory. Once the model is filled, these are read in chunks, in the order of the
model's modules. Several threads read the chunks that come next into a fixed number of buffers, since one thread copies
a few gigabytes a second out of the page cache. The buffers are reused, since the system has to clear new memory before
a file can be read into it. Where the device is a GPU, they are pinned, so the GPU copies one while others are filled.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import Tensor, nn

from corolla.chassis.errors import InternalError
from corolla.chassis.processors import available_cores
from corolla.models.chunked_reads import ChunkedTensor

BUFFER_BYTES: Final = 8 << 20
# Eight threads read faster than a GPU of today copies from the host.
_MOST_THREADS: Final = 8
# While all threads read, the device copies these.
_MORE_BUFFERS: Final = 2

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


class DeviceReader:
    """Reads tensors in chunks, through buffers that are made once.

    Args:
        is_pinned: whether the buffers are pinned; None: if the device is a GPU.
        num_threads: how many chunks are read at a time; None: as many as this process may use cores, up to a limit.
    """

    def __init__(self, device: torch.device, is_pinned: bool | None = None, num_threads: int | None = None) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda" if is_pinned is None else is_pinned
        self._num_threads = num_threads or min(_MOST_THREADS, available_cores())

    def read(self, tensors: Sequence[ChunkedTensor]) -> Generator[Tensor, None, None]:
        """Reads deferred tensors one after the other, while threads read ahead into the buffers.

        Close the iterator before the files are closed.

        Yields:
            Each tensor whole: `[rows, ...]` of its own shape, in its own dtype, on the device.

        Raises:
            CheckpointError: a file cannot be read.
        """
        # Tensors that have to be expanded take all threads of torch for one chunk.
        num_threads = self._num_threads if all(each.is_plain for each in tensors) else 1
        chunks = ((tensor, start, end) for tensor in tensors for start, end in _runs(tensor))
        buffers = [_Buffer(self._is_pinned) for _ in range(num_threads + _MORE_BUFFERS)]
        ahead: deque[tuple[_Buffer, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(num_threads, "weights") as threads:

            def begin(buffer: _Buffer) -> None:
                if (chunk := next(chunks, None)) is not None:
                    ahead.append((buffer, threads.submit(buffer.read, *chunk)))

            try:
                for buffer in buffers:
                    begin(buffer)
                for tensor in tensors:
                    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                    lines = target.view(tensor.row_shape)
                    for start, end in _runs(tensor):
                        buffer, read = ahead.popleft()
                        # The dtype changes on the device, which is faster there and takes no memory of the host.
                        lines[start:end].copy_(read.result().to(self._device, non_blocking=self._is_pinned))
                        if self._is_pinned:
                            buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                            buffer.copied.record(torch.cuda.current_stream(self._device))
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
    when_read: Callable[[nn.Module], None] = lambda module: None,
    read: Read | None = None,
) -> None:
    """Reads the deferred tensors of a filled model, module by module, and moves the modules to the device.

    Args:
        model: the model; parameters share the memory of their deferred tensors.
        tensors: the tensors with which the model was filled.
        when_read: called with each module once its own parameters lie on the device, before the next module is read. It
            changes no other module.
        read: reads the tensors; None: a DeviceReader does.

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
    read = read or DeviceReader(device).read
    with contextlib.closing(read(list(found.values()))) as reading:
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if parameters.pop(id(parameter), None) is not None:
                    parameter.data = next(reading) if id(parameter) in found else parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
            when_read(module)
