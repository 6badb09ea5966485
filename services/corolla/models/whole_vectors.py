"""Functions of single numbers, on CPUs, such that no token changes another's bits.

The last numbers of a tensor, which do not fill whole vectors of the processor, get another function of torch than those
before. So do numbers next to the cuts that torch makes in large tensors, among threads.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

# Two vectors of the largest registers, in the smallest type: torch's loops take so many numbers in a round.
_WHOLE_VECTORS: Final = 64
# torch cuts larger tensors among threads, between any two numbers.
_MAX_UNCUT: Final = 1 << 15


def apart(function: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Applies a function of single numbers to tokens, each filled up to whole vectors.

    Args:
        tokens: `[N, ...]` of any dtype, on the CPU.

    Returns:
        `[N, ...]` in the dtype that the function returns.
    """
    flat = tokens.reshape(len(tokens), -1)
    width = flat.shape[1]
    if missing := -width % _WHOLE_VECTORS:
        flat = functional.pad(flat, (0, missing))
    flat, most = flat.contiguous(), max(1, _MAX_UNCUT // flat.shape[1])
    applied = function(flat) if len(flat) <= most else torch.cat([function(part) for part in torch.split(flat, most)])
    return applied.narrow(1, 0, width).reshape(tokens.shape)


def in_whole_vectors(tokens: Tensor, num_read: int | None = None) -> tuple[Tensor, ...]:
    """Cuts tokens into parts that a function may get as they are.

    Args:
        tokens: `[N, size]` of any dtype, on the CPU.
        num_read: how many numbers of a token the function has at a time, a divisor of `size`; None: all of them.

    Returns:
        Parts `[tokens of the part, size]` in the same dtype; the last one ends with tokens of zeros.
    """
    size = num_read or tokens.shape[1]
    step = _WHOLE_VECTORS // math.gcd(_WHOLE_VECTORS, size)
    filled = functional.pad(tokens, (0, 0, 0, -len(tokens) % step))
    return torch.split(filled, max(step, _MAX_UNCUT // (size * step) * step))
