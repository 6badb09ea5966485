"""Converts torch tensors to raw bytes and back, without changing the numbers."""

import warnings
from typing import Final

import torch

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer

# Received bytes are read-only, and no code writes into a tensor made by `from_payload`.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_TYPES: Final[dict[torch.dtype, pb.TensorType.ValueType]] = {
    torch.float32: pb.TENSOR_TYPE_FLOAT32,
    torch.bfloat16: pb.TENSOR_TYPE_BFLOAT16,
    torch.float16: pb.TENSOR_TYPE_FLOAT16,
}
_DTYPES: Final = {number: dtype for dtype, number in _TYPES.items()}
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes by their names in settings."""


def tensor_type(dtype: torch.dtype) -> pb.TensorType.ValueType:
    """Returns the number of `dtype` in the protocol."""
    return _TYPES[dtype]


def describe_prompts(values: torch.Tensor) -> pb.BlockPrompts:
    """Describes the payload of trained prompts `[blocks, P, H]`, of any dtype in the protocol, on any device."""
    return pb.BlockPrompts(num_tokens=values.shape[1], dtype=tensor_type(values.dtype), hidden_size=values.shape[2])


def to_payload(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor of any shape, device and dtype, in row-major order on the CPU."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data


def check_payload(payload: Buffer, dtype: int, num_rows: int, hidden_size: int) -> torch.dtype:
    """Checks that `from_payload` can read the payload, and returns the dtype of its elements.

    Raises:
        MalformedMessage: the dtype is unknown, or the size does not match the shape.
    """
    torch_dtype: torch.dtype | None = _DTYPES.get(dtype)  # type: ignore[call-overload]
    if torch_dtype is None:
        raise MalformedMessage("dtype", "unknown tensor type")
    if len(payload) != num_rows * hidden_size * torch_dtype.itemsize:
        raise MalformedMessage("payload", "its size does not match its shape")
    return torch_dtype


def from_payload(payload: Buffer, dtype: int, num_rows: int, hidden_size: int) -> torch.Tensor:
    """Returns a read-only CPU tensor `[num_rows, hidden_size]` of `dtype` over the received bytes, without a copy.

    Raises as `check_payload` does.
    """
    torch_dtype = check_payload(payload, dtype, num_rows, hidden_size)
    if num_rows == 0:
        return torch.empty(0, hidden_size, dtype=torch_dtype)
    return torch.frombuffer(payload, dtype=torch_dtype).view(num_rows, hidden_size)
