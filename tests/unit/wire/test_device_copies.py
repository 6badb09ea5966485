"""Copies between pinned memory and a GPU: the doubles do them only once they are waited for, and check what torch does.

Where a copy has ended is known only from an event that was recorded behind it, on the stream that made it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.wire.device_copies import begin_reading, to_device

GPU = torch.device("cuda", 0)


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


def test_a_copy_from_a_gpu_is_read_once_the_work_behind_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Callable[[], object]] = []
    streams = {GPU: object()}

    class Copy(torch.Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
            assert type(source) is OnGpu
            assert non_blocking
            launched.append(lambda: plain(self).copy_(plain(source)))
            return self

    class Event:
        def record(self, stream: object) -> None:
            assert stream is streams[GPU]
            self.num_launched = len(launched)

        def synchronize(self) -> None:
            for work in launched[: self.num_launched]:
                work()

    def empty(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return torch.full(shape, torch.nan, dtype=dtype).as_subclass(Copy)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    hidden = torch.randn(3, 4, dtype=torch.bfloat16)
    finish = begin_reading(hidden.as_subclass(OnGpu))
    assert torch.equal(plain(finish()), hidden)
