"""Torch tensors as raw bytes, and back, without conversion."""

import warnings
from typing import Final

import torch

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer

# Received bytes are read-only and stay so: nothing writes into a tensor made by `from_payload`.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_TYPES: Final[dict[torch.dtype, pb.TensorType.ValueType]] = {
    torch.float32: pb.TENSOR_TYPE_FLOAT32,
    torch.bfloat16: pb.TENSOR_TYPE_BFLOAT16,
    torch.float16: pb.TENSOR_TYPE_FLOAT16,
}
_DTYPES: Final = {number: dtype for dtype, number in _TYPES.items()}
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The names by which settings call the dtypes."""


def tensor_type(dtype: torch.dtype) -> pb.TensorType.ValueType:
    """The wire's number for `dtype`."""
    return _TYPES[dtype]


def describe_prompts(values: torch.Tensor) -> pb.BlockPrompts:
    """What says of the payload of trained prompts, `[blocks, P, H]`, what it is."""
    return pb.BlockPrompts(num_tokens=values.shape[1], dtype=tensor_type(values.dtype), hidden_size=values.shape[2])


def to_payload(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous copy of `tensor` on the CPU; bfloat16 travels as it is."""
    flat = tensor.detach().contiguous().cpu().flatten()
    return flat.view(torch.uint8).numpy().data


def check_payload(payload: Buffer, dtype: int, num_rows: int, hidden_size: int) -> torch.dtype:
    """Makes sure that `from_payload` can read it; returns the elements' type.

    Raises:
        MalformedMessage: the dtype is unknown or the size is not that of the shape.
    """
    torch_dtype: torch.dtype | None = _DTYPES.get(dtype)  # type: ignore[call-overload]
    if torch_dtype is None:
        raise MalformedMessage("dtype", "unknown tensor type")
    if len(payload) != num_rows * hidden_size * torch_dtype.itemsize:
        raise MalformedMessage("payload", "its size does not match its shape")
    return torch_dtype


def from_payload(payload: Buffer, dtype: int, num_rows: int, hidden_size: int) -> torch.Tensor:
    """`[num_rows, hidden_size]` over the received bytes; read-only. Raises as `check_payload` does."""
    torch_dtype = check_payload(payload, dtype, num_rows, hidden_size)
    if num_rows == 0:
        return torch.empty(0, hidden_size, dtype=torch_dtype)
    return torch.frombuffer(payload, dtype=torch_dtype).view(num_rows, hidden_size)
