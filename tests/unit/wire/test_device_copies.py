"""Copies between pinned memory and a GPU: the doubles do them only once they are waited for, and check what torch does.

Where a copy has ended is known only from an event that was recorded behind it, on the stream that made it.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.wire.device_copies import await_copies, begin_reading, hand_to_steps, on_copy_stream, to_device

GPU = torch.device("cuda", 0)
NUMBERS = itertools.count(1)


class OnGpu(torch.Tensor):
    device = GPU


class Pinned(torch.Tensor):
    def to(self, **options: Any) -> Tensor:  # type: ignore[override]
        assert options == {"device": GPU, "dtype": self.dtype, "non_blocking": True}
        return self.as_subclass(OnGpu)


class Pageable(torch.Tensor):
    def pin_memory(self, device: Any = None) -> Tensor:
        return self.clone().as_subclass(Pinned)


def plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(torch.Tensor)


def test_what_goes_to_a_gpu_is_converted_first_and_then_pinned() -> None:
    hidden = torch.randn(3, 4)
    copied = to_device(hidden.as_subclass(Pageable), GPU, torch.bfloat16)
    assert type(copied) is OnGpu
    assert torch.equal(plain(copied), hidden.to(torch.bfloat16))


def test_what_stays_on_a_processor_is_not_copied() -> None:
    hidden = torch.randn(3, 4)
    assert to_device(hidden, torch.device("cpu"), torch.float32) is hidden


class Stream:
    """A stream whose work is done only once somebody waits for it, in order, and after the work that it waits for."""

    def __init__(self, device: torch.device) -> None:
        assert device == OnGpu.device
        self._work: list[Callable[[], object]] = []
        self._num_done = 0

    def launch(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait_stream(self, other: "Stream") -> None:
        self.launch(other.mark())

    def mark(self) -> Callable[[], None]:
        """A function that does what has been launched so far."""
        end = len(self._work)

        def do() -> None:
            while self._num_done < end:
                self._num_done += 1
                self._work[self._num_done - 1]()

        return do


class Streams:
    """A double of `torch.cuda` for one device.

    Attributes:
        device: a device that no other test uses, since a process keeps its streams.
        computing: the stream of the steps.
        users: the streams that a tensor's memory was noted for.
    """

    def __init__(self) -> None:
        self.device = OnGpu.device
        self.computing = Stream(self.device)
        self.current = self.computing
        self.users: list[tuple[Tensor, Stream]] = []

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: torch.device) -> Stream:
        assert device == self.device
        return self.current


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Streams:
    monkeypatch.setattr(OnGpu, "device", torch.device("cuda", next(NUMBERS)))
    streams = Streams()

    class Event:
        def record(self, stream: Stream) -> None:
            self.synchronize = stream.mark()

    class Copy(torch.Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
            assert non_blocking
            streams.current.launch(lambda: plain(self).copy_(plain(source)))
            return self

    def empty(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return torch.full(shape, torch.nan, dtype=dtype).as_subclass(Copy)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        assert tensor.device == streams.device, "torch notes streams of tensors on a device only"
        streams.users.append((tensor, stream))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    return streams


def test_the_copy_stream_waits_for_what_was_launched_before_and_for_nothing_later(cuda: Streams) -> None:
    pages, later = torch.zeros(3), torch.zeros(3)
    cuda.computing.launch(lambda: pages.fill_(7.0))
    on_gpu = pages.as_subclass(OnGpu)
    with on_copy_stream(cuda.device, on_gpu):
        assert cuda.current is not cuda.computing
        copying = cuda.current
        finish = begin_reading(on_gpu)
    assert cuda.current is cuda.computing
    cuda.computing.launch(lambda: later.fill_(1.0))
    assert finish().tolist() == [7.0, 7.0, 7.0]
    assert later.tolist() == [0.0, 0.0, 0.0], "the reader waited for a later step"
    assert cuda.users == [(on_gpu, copying)]
    # Steps may free what they computed, and those that come from the other stream may free what they made.
    with on_copy_stream(cuda.device):
        assert cuda.current is copying
    hand_to_steps(on_gpu, torch.zeros(1))
    assert cuda.users[1:] == [(on_gpu, cuda.computing)]


def test_what_reads_nothing_of_the_steps_does_not_wait_for_them(cuda: Streams) -> None:
    done: list[str] = []
    cuda.computing.launch(lambda: done.append("step"))
    with on_copy_stream(cuda.device):
        cuda.current.launch(lambda: done.append("copy"))
        cuda.current.mark()()
    assert done == ["copy"]


def test_copies_that_steps_wait_for_do_not_queue_behind_large_ones(cuda: Streams) -> None:
    done: list[str] = []
    with on_copy_stream(cuda.device):
        cuda.current.launch(lambda: done.append("large"))
    await_copies(cuda.device)
    cuda.computing.mark()()
    assert done == []


def test_a_copy_from_a_gpu_is_read_once_the_work_before_it_has_ended(cuda: Streams) -> None:
    numbers, later = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(1)
    hidden = torch.randn(3, 4, dtype=torch.bfloat16)
    cuda.computing.launch(lambda: numbers.copy_(hidden))
    finish = begin_reading(numbers.as_subclass(OnGpu))
    cuda.computing.launch(lambda: later.fill_(1.0))
    assert torch.equal(plain(finish()), hidden)
    assert later.item() == 0.0
