"""How far a server has come with reading its weights, by the kernel's count of what this process has read."""

import time
from collections.abc import Callable, Iterable
from typing import Final, Self

import psutil

from corolla.models.checkpoint import Checkpoint

_MOST: Final = 0.99
"""The share stays below one, since what follows the weights takes time, too."""
_ENOUGH: Final = 0.02
"""The speed of a smaller share says little."""


def num_read_bytes() -> int:
    """The bytes that this process has read until now, out of the page cache or not; 0: the system does not count."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return int(getattr(counters(), "read_chars", 0)) if counters is not None else 0


class StartProgress:
    """Counts from now on.

    Args:
        num_bytes: what there is to read; 0: not known.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        num_read: Callable[[], int] = num_read_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_bytes = num_bytes
        self._num_read = num_read
        self._clock = clock
        self._began = num_read(), clock()

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Iterable[str]) -> Self:
        """Counts the tensors of these stored names, as far as their files are here and are read, not mapped."""
        return cls(sum(held.num_bytes for held in checkpoint.stored(names).values()))

    @property
    def share(self) -> float:
        """The part that has been read; 0: nothing, or it is not known."""
        num_read = self._num_read() - self._began[0]
        return min(_MOST, num_read / self._num_bytes) if self._num_bytes else 0.0

    @property
    def seconds_left(self) -> float:
        """The time for the rest at the speed so far; 0: not known."""
        share = self.share
        return (self._clock() - self._began[1]) * (1 - share) / share if share >= _ENOUGH else 0.0
