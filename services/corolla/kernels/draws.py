"""Draws tokens by a compiled function, on CPUs."""

import ctypes
import functools
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.compiler import Compiled, share
from corolla.kernels.draw_source import JOB, module_source

_Job: Final = ctypes.c_int64 * len(JOB)

_LEAST_TOKENS_OF_THREADS: Final = 1 << 15
"""How many tokens all rows must have together so that it pays to wake other threads."""


def draw_tokens(probabilities: Tensor, keys: Tensor, positions: Tensor, shares: Tensor, least: Tensor) -> Tensor:
    """Draws a token for each row; all tensors are on the CPU and contiguous.

    Args:
        probabilities: float32 `[R, V]`.
        keys: int64 `[R]`, the bits of the seeds.
        positions: int64 `[R]`: where in its answer each token is.
        shares: int64 `[R]`, in units of probability; below 0 top-p excludes no token.
        least: float32 `[R]`: less probable tokens do not race.

    Returns:
        int64 `[R]`: -1 for a row of which no probability is above 0.
    """
    num_rows, width = probabilities.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    tensors = (probabilities, keys, positions, shares, least, tokens)
    job = _Job(*(each.data_ptr() for each in tensors), width)
    are_many = num_rows * width >= _LEAST_TOKENS_OF_THREADS
    num_threads = min(num_rows, torch.get_num_threads()) if are_many else 1
    share(_module().address("draw"), ctypes.addressof(job), num_rows, num_threads)
    return tokens


@functools.cache
def _module() -> Compiled:
    return Compiled(module_source())
