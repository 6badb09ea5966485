"""Copies to and from a GPU that run while it computes something else.

A copy from or to ordinary memory waits for all work that the GPU was given before it. So these copies use pinned
memory, which torch keeps when it is no longer used, and gives out again once the copies that use it have ended. Copies
by `begin_copy` run on a stream of their own, for which the stream that computes waits once. Large copies, for which no
step waits, run on another one (`on_copy_stream`).
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor

_ALIGNED: Final = 16


class _Use(Enum):
    STEPS_WAIT = "copies that a step waits for"
    NO_STEP_WAITS = "copies that no step waits for"


_streams: Final[dict[tuple[torch.device, _Use], torch.cuda.Stream]] = {}
_lock: Final = threading.Lock()


def empty_to_copy(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor `[size]` of `dtype` on the CPU whose numbers will be copied to `device`."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def begin_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of a tensor on the CPU, of any shape and dtype. Any thread may call this.

    Until `await_copies`, the copy may not have its numbers yet.
    """
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.stream(_stream(device, _Use.STEPS_WAIT)):
        copied = tensor.to(device, non_blocking=True)
    # The memory came from the other stream, which would use it again as soon as it is free.
    copied.record_stream(torch.cuda.current_stream(device))
    return copied


@contextmanager
def on_stream_of_copies(device: torch.device) -> Iterator[None]:
    """What the calling thread launches within the context runs on the stream of `begin_copy`."""
    with torch.cuda.stream(_stream(device, _Use.STEPS_WAIT)) if device.type == "cuda" else nullcontext():
        yield


def await_copies(device: torch.device) -> None:
    """Lets what the calling thread computes from now on see the copies that were begun. The thread does not wait."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device, _Use.STEPS_WAIT))


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
    whole = empty_to_copy(ends[-1] if ends else 0, torch.uint8, device)
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
    stream = _stream(device, _Use.NO_STEP_WAITS)
    if computed:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for tensor in computed:
            # Steps would use the memory again as soon as it is free, and do not wait for this stream.
            tensor.record_stream(stream)
        yield


def hand_to_steps(*tensors: Tensor) -> None:
    """Lets the calling thread use tensors, of any shape and dtype, that were made `on_copy_stream` and are complete."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _stream(device: torch.device, use: _Use) -> torch.cuda.Stream:
    with _lock:
        if (device, use) not in _streams:
            _streams[device, use] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device, use]
