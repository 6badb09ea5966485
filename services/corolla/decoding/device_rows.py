"""A tensor on a device gives each sequence a row, which the sequence keeps until it drops its slot.

A batch takes its rows by their indices, so nothing is put together for a step, whichever sequences it has. All work on
the tensor runs in the order of the launches, so a row may go to another sequence while earlier work still reads it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from corolla.wire.device_copies import to_device


class Slot:
    """A row of `DeviceRows`, which is free again once nothing holds the slot.

    Attributes:
        rows: where the row is.
        index: which row it is.
    """

    def __init__(self, rows: "DeviceRows", index: int) -> None:
        self.rows = rows
        self.index = index

    def __del__(self) -> None:
        self.rows.give_back(self.index)


class DeviceRows:
    """Rows of `width` numbers of `dtype` on `device`; there are twice as many whenever all are taken.

    Attributes:
        numbers: `[rows, width]`.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.zeros(1, width, dtype=dtype, device=device)
        self._free = [0]

    def take(self, numbers: Tensor) -> Slot:
        """Takes a row, which gets `numbers`, `[width]` in any dtype on the CPU. The thread waits for no device."""
        if not self._free:
            size = len(self.numbers)
            self.numbers = torch.cat((self.numbers, torch.zeros_like(self.numbers)))
            self._free.extend(range(size, 2 * size))
        index = self._free.pop()
        self.numbers[index].copy_(to_device(numbers, self.numbers.device, self.numbers.dtype))
        return Slot(self, index)

    def give_back(self, index: int) -> None:
        self._free.append(index)


def indices_of(slots: Sequence[Slot]) -> tuple[int, ...]:
    """The rows that slots of one tensor have."""
    return tuple(slot.index for slot in slots)
