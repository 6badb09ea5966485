"""Recurrences over texts of different sessions, by compiled functions, on CPUs; see `recurrence_source`.

All tensors are float32, on the CPU; numbers of one token lie one after another. States that a function gets stay as
they are.
"""

import ctypes
import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.compiler import Compiled, max_sums, share
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import LEAST_PRODUCTS_OF_THREADS
from corolla.kernels.recurrence_source import JOB, DeltaShape, HeadSizes, Shape, SpaceShape, module_source

_Job: Final = ctypes.c_int64 * len(JOB)
_VECTORS_OF_SUM: Final = 3


def is_whole(size: int) -> bool:
    """Compiled functions take values of the delta rule, and keys of state spaces, of this size."""
    return size % LANES == 0


def run_delta_rule(
    states: Sequence[Tensor],
    bounds: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    scaling: float,
) -> tuple[Tensor, list[Tensor]]:
    """Runs the tokens of each row through the row's states by the gated delta rule.

    Args:
        states: for each row, `[1, heads, key size, value size]`, contiguous.
        bounds: each row's first token, and the number of all tokens N; each row has tokens.
        query: `[N, key heads, key size]`.
        key: `[N, key heads, key size]`, with the same stride.
        value: `[N, heads, value size]`.
        decay: `[N, heads]`, or `[N, heads, key size]`: the factors of the states.
        rate: `[N, heads]`: the share of the value that replaces what the state held for the key.
        scaling: the factor of queries.

    Returns:
        The output, `[N, heads, value size]`, and the new states.
    """
    _, num_heads, key_size, value_size = states[0].shape
    heads = HeadSizes(num_heads, key.shape[1], key_size, value_size)
    shape = DeltaShape(heads, decay.dim() == 3, max(1, max_sums() // _VECTORS_OF_SUM))
    return _run(shape, states, bounds, (query, key, value, decay, rate), scaling)


def run_state_space(
    states: Sequence[Tensor], bounds: Sequence[int], query: Tensor, key: Tensor, value: Tensor, decay: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Runs the tokens of each row through the row's states by the state space of Mamba-2.

    Args:
        states: for each row, `[1, heads, value size, key size]`, contiguous.
        bounds: each row's first token, and the number of all tokens N; each row has tokens.
        query: `[N, key heads, key size]`, there called C.
        key: `[N, key heads, key size]`, with the same stride; there called B.
        value: `[N, heads, value size]`, which the lengths of time steps have multiplied.
        decay: `[N, heads]`: the factors of the states.

    Returns:
        The output, `[N, heads, value size]`, and the new states.
    """
    _, num_heads, value_size, key_size = states[0].shape
    shape = SpaceShape(HeadSizes(num_heads, key.shape[1], key_size, value_size))
    return _run(shape, states, bounds, (query, key, value, decay, decay), 1.0)


def _run(
    shape: Shape, states: Sequence[Tensor], bounds: Sequence[int], inputs: Sequence[Tensor], scaling: float
) -> tuple[Tensor, list[Tensor]]:
    query, _, value, decay, rate = inputs
    if any(start >= end for start, end in itertools.pairwise(bounds)):
        raise ValueError("a row has no tokens, so nothing writes the state after it")
    after = [torch.empty_like(each) for each in states]
    output = torch.empty(bounds[-1], shape.heads.num_heads, shape.heads.value_size, dtype=torch.float32)
    addresses = [[each.data_ptr() for each in part] for part in (states, after)]
    tables = [(ctypes.c_int64 * len(each))(*each) for each in (*addresses, bounds)]
    job = _Job(
        *map(ctypes.addressof, tables),
        *(each.data_ptr() for each in (*inputs, output)),
        *(each.stride(0) for each in (query, value, decay, rate)),
        struct.unpack("I", struct.pack("f", scaling))[0],
    )
    are_many = bounds[-1] * states[0].numel() >= LEAST_PRODUCTS_OF_THREADS
    num_threads = torch.get_num_threads() if are_many else 1
    num_pieces = len(states) * shape.heads.num_heads * shape.pieces_of_head
    share(_module(shape).address("piece"), ctypes.addressof(job), num_pieces, num_threads)
    return output, after


@functools.cache
def _module(shape: Shape) -> Compiled:
    return Compiled(module_source(shape))
