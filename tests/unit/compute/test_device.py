"""A device that cannot be used, or has too little memory, ends the start with a sentence that says what to change."""

from collections.abc import Callable

import pytest
import torch

from corolla.chassis.errors import StartupError
from corolla.compute.device import is_out_of_memory, memory_for, open_device

CPU = torch.device("cpu")


def test_a_processor_is_always_there() -> None:
    assert open_device("cpu") == CPU


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("gpu", "is not the name of a device: set it to cpu, cuda or cuda:1"),
        ("cuda:x", "is not the name of a device"),
        pytest.param(
            "cuda", "cannot be used: .*TORCH_VARIANT=cuda",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch's build for CUDA"),
        ),
        ("meta", "cannot be used: "),
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_used_ends_the_start(name: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=f"COROLLA_DEVICE={name} {sentence}"):
        open_device(name)


def _too_much() -> None:
    torch.empty(1 << 60, dtype=torch.int8)


def _device_is_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("work", [_too_much, _device_is_full])
def test_a_lack_of_memory_says_what_to_change(work: Callable[[], None]) -> None:
    with (
        pytest.raises(StartupError, match=r"the weights do not fit into the memory of this machine: hold fewer blocks"),
        memory_for("the weights", CPU, "hold fewer blocks"),
    ):
        work()


def test_other_failures_stay_as_they_are() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"), memory_for("the weights", CPU, ""):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
