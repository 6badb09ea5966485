"""Reads numbers that a device computes, without waiting for what it computes afterwards."""

from collections.abc import Callable

import torch
from torch import Tensor


class Readings:
    """Reads numbers from a device. Not thread-safe.

    On a GPU, `Tensor.item` and `Tensor.tolist` wait for all work that was launched before, so a caller that launches
    more work first waits for that, too, and one that reads first leaves the GPU without work meanwhile. Here the copy
    of the numbers is launched, then more work can be, and the reader waits for the copy alone.

    Args:
        device: where the numbers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Begins to read numbers.

        Args:
            numbers: a tensor of any shape and dtype, on the device.

        Returns:
            A function that waits for the numbers and returns them: a tensor of the same shape and dtype, on a GPU a
            copy on the CPU.
        """
        if self._device.type != "cuda":
            return lambda: numbers
        # Torch gives pinned memory to others only after the copies into it have ended.
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_copied.record(torch.cuda.current_stream(self._device))

        def finish() -> Tensor:
            is_copied.synchronize()
            return copied

        return finish
