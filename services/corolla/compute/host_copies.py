"""Copies of hidden states between a GPU and pinned memory, which run while the calling thread goes on.

A copy from or to ordinary memory makes its caller wait for all work that the GPU was given before. Torch keeps pinned
memory that is no longer used and gives it out again, once the copies that use it have ended.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(hidden: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`hidden`, of any shape, device and dtype, in `dtype` on `device`; the same tensor if nothing differs.

    The calling thread does not wait for a GPU. What it launches from now on sees the whole copy.
    """
    if device.type == "cuda" and hidden.device.type == "cpu":
        # If the copy converted, it would do so in ordinary memory.
        hidden = hidden.to(dtype).pin_memory()
    return hidden.to(device=device, dtype=dtype, non_blocking=True)


def begin_copy(hidden: Tensor) -> Callable[[], Tensor]:
    """Begins to copy `hidden`, of any shape and dtype, from a GPU.

    Returns:
        A function that waits for the copy and returns it, in pinned memory, with the same shape and dtype.
    """
    copied = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
    copied.copy_(hidden, non_blocking=True)
    is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_copied.record(torch.cuda.current_stream(hidden.device))

    def finish() -> Tensor:
        is_copied.synchronize()
        return copied

    return finish
