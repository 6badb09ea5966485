"""Copies to and from a GPU that run while it computes something else.

A copy from or to ordinary memory waits for all work that the GPU was given before it. So these copies use pinned
memory, which torch keeps when it is no longer used, and gives out again once the copies that use it have ended. Large
copies, for which no step waits, run on a stream of their own (`on_copy_stream`).
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_ALIGNED: Final = 16


_streams: Final[dict[torch.device, torch.cuda.Stream]] = {}
_lock: Final = threading.Lock()


def to_device(numbers: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`numbers`, of any shape, device and dtype, in `dtype` on `device`; the same tensor if nothing differs.

    The calling thread waits for a GPU only if the numbers come from there. What it launches from now on sees the whole
    copy.
    """
    if numbers.dtype is dtype and numbers.device == device:
        return numbers
    numbers = to_copy(numbers, device, dtype)
    return numbers.to(device=device, dtype=dtype, non_blocking=device.type == "cuda")


def to_copy(numbers: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`numbers`, of any shape, device and dtype, so that a copy in `dtype` to `device` makes no thread wait.

    Numbers of the CPU for a GPU come in `dtype` in pinned memory; others are returned as they are.
    """
    if device.type == "cuda" and numbers.device.type == "cpu":
        # If the copy converted, it would do so in ordinary memory.
        return numbers.to(dtype).pin_memory()
    return numbers


def copied_numbers(parts: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Brings numbers of Python to `device`. For a GPU that is one copy, for which the calling thread does not wait.

    Args:
        parts: lists of numbers, each with an integer dtype.

    Returns:
        `[length]` of its dtype for each list. Those on a GPU are views of one tensor.
    """
    if device.type != "cuda":
        return [torch.tensor(numbers, dtype=dtype, device=device) for numbers, dtype in parts]
    sizes = [len(numbers) * dtype.itemsize for numbers, dtype in parts]
    # Kernels are compiled for addresses that are multiples of 16, as addresses of whole tensors are.
    ends = list(itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    whole = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=True)
    places = [slice(start, start + size) for start, size in zip((0, *ends), sizes, strict=False)]
    for (numbers, dtype), place in zip(parts, places, strict=True):
        whole[place].view(dtype).numpy()[:] = numbers
    copied = whole.to(device, non_blocking=True)
    return [copied[place].view(dtype) for (_, dtype), place in zip(parts, places, strict=True)]


@functools.lru_cache(maxsize=256)
def on_device(values: tuple[float, ...] | tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The values as a tensor `[len(values)]` of `dtype` on `device`, which must not be changed.

    Making it does not wait for the device. What the rows of a batch want seldom changes from one step to the next, so
    the tensors are kept.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def picked(every: Tensor, indices: Sequence[int]) -> Tensor:
    """The rows of `every`, `[R, ...]` in any dtype, at `indices`; makes them without waiting for the device.

    The indices are in order, and each occurs once. The result is on the same device.
    """
    return every if len(indices) == len(every) else every[on_device(tuple(indices), every.device, torch.int64)]


def with_rows(every: Tensor, indices: Sequence[int], rows: Tensor) -> Tensor:
    """A tensor like `every`, `[R, ...]` in any dtype, with other `rows` at `indices`; see `picked`."""
    if len(indices) == len(every):
        return rows
    return every.index_copy(0, on_device(tuple(indices), every.device, torch.int64), rows)


@dataclass(frozen=True, slots=True)
class BegunReading:
    """Numbers on their way to the host. A call waits for them and returns them.

    Attributes:
        numbers: of any shape and dtype, on the CPU, or on the device that the numbers never leave.
        is_copied: happens once the numbers are there; None: they are there.
    """

    numbers: Tensor
    is_copied: torch.cuda.Event | None = None

    def __call__(self) -> Tensor:
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return self.numbers

    @property
    def has_arrived(self) -> bool:
        """True if a call returns at once."""
        return self.is_copied is None or bool(self.is_copied.query())  # type: ignore[no-untyped-call]


def begin_reading(numbers: Tensor) -> BegunReading:
    """Begins to read `numbers`, of any shape, dtype and device.

    On a GPU, `Tensor.item`, `tolist` and `cpu` wait for all work that was launched before, so a caller that launches
    more work first waits for that, too, and one that reads first leaves the GPU without work meanwhile. Here the copy
    is launched, then more work can be, and the reader waits for the copy alone.

    Returns:
        What waits for the numbers and returns them, with the same shape and dtype; numbers of a GPU come in pinned
        memory.
    """
    if numbers.device.type != "cuda":
        return BegunReading(numbers)
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copied.copy_(numbers, non_blocking=True)
    is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_copied.record(torch.cuda.current_stream(numbers.device))
    return BegunReading(copied, is_copied)


class Reading:
    """Numbers of one device that a single copy brings to the host, as `begin_reading` does."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._read: BegunReading | None = None

    def add(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Adds numbers, of any shape, dtype and device, which float64 can hold. The copy has not begun.

        Returns:
            A function that waits for the copy, or begins it before, and returns the numbers in the same shape; numbers
            of a GPU come as float64.
        """
        if numbers.device.type != "cuda":
            return lambda: numbers
        start = sum(map(len, self._parts))
        self._parts.append(numbers.double().flatten())
        end, shape = start + len(self._parts[-1]), numbers.shape

        def read() -> Tensor:
            return self._begun()()[start:end].view(shape)

        return read

    def begin(self) -> None:
        """Begins the copy, if it has not begun. Nothing may be added from now on."""
        self._begun()

    @property
    def has_arrived(self) -> bool:
        """True if the copy has begun and ended, so that no function of `add` waits."""
        return self._read is not None and self._read.has_arrived

    def _begun(self) -> BegunReading:
        if self._read is None:
            self._read = begin_reading(torch.cat(self._parts) if self._parts else torch.empty(0))
        return self._read


@contextmanager
def on_copy_stream(device: torch.device, *computed: Tensor) -> Iterator[None]:
    """What the calling thread launches within the context runs on a stream of its own, and steps do not wait for it.

    To read a number there waits for that stream only. Tensors that are made there must be given to `hand_to_steps`
    before a step uses them.

    Args:
        computed: tensors on `device`, of any shape and dtype, that were computed by steps or between them, and that the
            work reads: it waits for what the calling thread launched before.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if computed:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for tensor in computed:
            # Steps would use the memory again as soon as it is free, and do not wait for this stream.
            tensor.record_stream(stream)
        yield


def record_copies(device: torch.device) -> Callable[[], None]:
    """A function that returns once a GPU has made the copies that the calling thread launched in the current stream."""
    are_made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    are_made.record(torch.cuda.current_stream(device))
    return are_made.synchronize


def hand_to_steps(*tensors: Tensor) -> None:
    """Lets the calling thread use tensors, of any shape and dtype, that were made `on_copy_stream` and are complete."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _stream(device: torch.device) -> torch.cuda.Stream:
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]
