"""Reads numbers that a device computes, without waiting for what it computes afterwards."""

from collections.abc import Callable

import torch
from torch import Tensor


class Readings:
    """Reads one number at a time from a device. Not thread-safe.

    On a GPU, `Tensor.item` waits for all work that was launched before, so a caller that reads first and launches then
    leaves the GPU without work meanwhile. Here the copy of the number is launched, and then more work can be.

    Args:
        device: where the numbers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._copy = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, number: Tensor) -> Callable[[], float]:
        """Begins to read a number.

        Args:
            number: float32 of any shape with one number, on the device.

        Returns:
            A function that waits for the number and returns it. It must be called before `begin` is called again.
        """
        if self._device.type != "cuda":
            return number.item
        self._copy.copy_(number, non_blocking=True)
        self._is_copied.record(torch.cuda.current_stream(self._device))
        return self._finish

    def _finish(self) -> float:
        self._is_copied.synchronize()
        return self._copy.item()
