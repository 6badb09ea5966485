"""Steps of the gated delta rule for rows of different sessions, by a compiled function, on CPUs."""

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.compiler import Compiled, max_sums, share
from corolla.kernels.delta_source import JOB, DeltaShape, module_source
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import LEAST_PRODUCTS_OF_THREADS

_Job: Final = ctypes.c_int64 * len(JOB)
_VECTORS_OF_SUM: Final = 3


def can_step(value_size: int) -> bool:
    """The compiled function takes values of this size."""
    return value_size % LANES == 0


def step_states(
    states: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    scaling: float,
) -> tuple[Tensor, list[Tensor]]:
    """Runs one token of each row through the row's states, which stay as they are.

    All tensors are float32, on the CPU. Numbers of one token lie one after another.

    Args:
        states: for each row, `[1, heads, key size, value size]`, contiguous.
        query: `[R, key heads, key size]`.
        key: `[R, key heads, key size]`, with the same stride.
        value: `[R, heads, value size]`.
        decay: `[R, heads]`, or `[R, heads, key size]`: the factors of the states.
        rate: `[R, heads]`: the share of the value that replaces what the state held for the key.
        scaling: the factor of queries.

    Returns:
        The output, `[R, heads, value size]`, and the new states.
    """
    _, num_heads, key_size, value_size = states[0].shape
    shape = DeltaShape(
        num_heads, key.shape[1], key_size, value_size, decay.dim() == 3, max(1, max_sums() // _VECTORS_OF_SUM)
    )
    after = [torch.empty_like(each) for each in states]
    output = torch.empty(len(states), num_heads, value_size)
    tables = [(ctypes.c_int64 * len(states))(*(each.data_ptr() for each in part)) for part in (states, after)]
    job = _Job(
        *map(ctypes.addressof, tables),
        *(each.data_ptr() for each in (query, key, value, decay, rate, output)),
        *(each.stride(0) for each in (query, value, decay, rate)),
        struct.unpack("I", struct.pack("f", scaling))[0],
    )
    are_many = len(states) * states[0].numel() >= LEAST_PRODUCTS_OF_THREADS
    num_threads = torch.get_num_threads() if are_many else 1
    share(_module(shape).address("piece"), ctypes.addressof(job), len(states) * shape.pieces_of_row, num_threads)
    return output, after


@functools.cache
def _module(shape: DeltaShape) -> Compiled:
    return Compiled(module_source(shape))
