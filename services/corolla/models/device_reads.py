"""Reads stored tensors straight into the memory of a device, so that no tensor lies whole in the memory of the host.

Transformers fills a model in the memory of the host. For tensors that it would only rename, it gets deferred ones,
which have the right shape and take no memory. Once the model is filled, each of these is read in chunks through two
buffers. Their memory is pinned where the device is a GPU, which copies one buffer while the other one is filled.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from corolla.chassis.errors import InternalError
from corolla.models.chunked_reads import ChunkedTensor

BUFFER_BYTES: Final = 16 << 20
_NUM_BUFFERS: Final = 2


class DeviceReader:
    """Reads tensors in chunks, through buffers that are made once.

    Args:
        device: where the tensors shall lie.
        is_pinned: whether the buffers are pinned; None: if the device is a GPU.
    """

    def __init__(self, device: torch.device, is_pinned: bool | None = None) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda" if is_pinned is None else is_pinned
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _NUM_BUFFERS
        self._copied: list[Any] = [None] * _NUM_BUFFERS
        self._next = 0

    def read(self, tensor: ChunkedTensor) -> Tensor:
        """Reads a deferred tensor whole: `[rows, ...]` of its own shape, in its own dtype, on the device."""
        shape = tensor.shape
        target = torch.empty(shape, dtype=tensor.dtype, device=self._device)
        row_bytes = max(1, math.prod(shape[1:]) * torch.float32.itemsize)
        num_rows = max(1, BUFFER_BYTES // row_bytes)
        for start in range(0, shape[0], num_rows):
            end = min(start + num_rows, shape[0])
            index = self._next
            self._next = (index + 1) % _NUM_BUFFERS
            if self._copied[index] is not None:
                self._copied[index].synchronize()
            rows = self._staged(index, tensor.rows(start, end))
            # The dtype changes on the device, which is faster there and takes no memory of the host.
            target[start:end].copy_(rows.to(self._device, non_blocking=self._is_pinned))
            if self._is_pinned:
                self._copied[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied[index].record()
        return target

    def _staged(self, index: int, rows: Tensor) -> Tensor:
        """Returns the rows in a buffer that a GPU can copy from by itself; for other devices, the rows as they are."""
        if not self._is_pinned:
            return rows
        if len(self._buffers[index]) < rows.nbytes:
            num_bytes = max(BUFFER_BYTES, rows.nbytes)
            self._buffers[index] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffers[index][: rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows)


def read_deferred(
    model: nn.Module,
    tensors: Iterable[ChunkedTensor],
    device: torch.device,
    when_read: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Reads the deferred tensors of a filled model, module by module, and moves the modules to the device.

    Args:
        model: the model; parameters share the memory of their deferred tensors.
        tensors: the tensors with which the model was filled.
        device: where the model shall lie.
        when_read: called with each module once its own parameters lie on the device, before the next module is read.

    Raises:
        CheckpointError: a file cannot be read.
    """
    deferred = {tensor.address: tensor for tensor in tensors if tensor.address is not None}
    reader = DeviceReader(device)
    # Tied parameters are one object, which several modules have.
    read: set[int] = set()
    missing = set(deferred)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in read:
                continue
            read.add(id(parameter))
            address = parameter.untyped_storage().data_ptr()
            if address in deferred:
                parameter.data = reader.read(deferred[address])
                missing.discard(address)
            else:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        when_read(module)
    if missing:
        raise InternalError(f"{len(missing)} tensors of the checkpoint were copied before they were read")
