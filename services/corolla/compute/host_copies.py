"""Copies of hidden states to a GPU by pinned memory, which run while the calling thread goes on.

A copy from ordinary memory makes its caller wait for all work that the GPU was given before. Torch keeps pinned memory
that is no longer used and gives it out again, once the copies that use it have ended.
"""

import torch
from torch import Tensor


def to_device(hidden: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`hidden`, of any shape, device and dtype, in `dtype` on `device`; the same tensor if nothing differs.

    The calling thread does not wait for a GPU. What it launches from now on sees the whole copy.
    """
    if hidden.dtype is dtype and hidden.device == device:
        return hidden
    if device.type == "cuda" and hidden.device.type == "cpu":
        # If the copy converted, it would do so in ordinary memory.
        hidden = hidden.to(dtype).pin_memory()
    return hidden.to(device=device, dtype=dtype, non_blocking=True)
