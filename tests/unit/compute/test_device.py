"""A device that cannot be used, or has too little memory, ends the start with a sentence that says what to change."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import StartupError
from corolla.compute.cuda_driver import begin_opening, why_driver_fails
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


def test_the_thread_that_opens_a_gpu_launches_there_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the device of the thread, whichever has the tensors."""
    opened: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", opened.append)
    ones = torch.ones

    def ones_there(size: int, device: torch.device) -> torch.Tensor:
        opened.append(device)
        return ones(size)

    monkeypatch.setattr(torch, "ones", ones_there)
    device = torch.device("cuda", 1)
    assert open_device("cuda:1") == device
    assert opened == [device, device]


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


class OldDriver:
    """A driver that runs programs up to a version of CUDA; 0: it does not say."""

    def __init__(self, version: int) -> None:
        self._version = version

    def cuDriverGetVersion(self, version: Any) -> int:
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int)).contents.value = self._version
        return 0 if self._version else 100


def _no_driver(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    "load, says",
    [
        (
            lambda _: OldDriver(12080),
            r"needs NVIDIA's driver 580 or later, and .* 570\.86\.15, goes up to CUDA 12\.8; upd",
        ),
        (_no_driver, r"needs NVIDIA's driver 580 or later, and there is none here \(libcuda\.so\.1.*--gpus all"),
        (lambda _: OldDriver(13000), None),
        (lambda _: OldDriver(13020), None),
        (lambda _: OldDriver(0), None),
    ],
    ids=["older", "none", "as old as torch", "newer", "failing"],
)
def test_a_driver_that_is_too_old_for_torch_is_named_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any], says: str | None
) -> None:
    module = tmp_path / "version"
    module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    )
    reason = why_driver_fails("13.0", load, module)
    if says is None:
        assert reason is None
        return
    assert reason is not None
    assert re.search(says, reason)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("corolla.compute.device.why_driver_fails", lambda _built_for: reason)
    with pytest.raises(StartupError, match=rf"COROLLA_DEVICE=cuda:0 cannot be used: .*{says}"):
        open_device("cuda:0")


class Driver:
    """What the driver's calls take and give, by CUDA's driver API; it has devices 0 and 1.

    Attributes:
        retained: the devices whose contexts are kept.
    """

    def __init__(self, name: str, result: int = 0) -> None:
        assert name == "libcuda.so.1"
        self.retained: list[int] = []
        self._result, self._is_initialised = result, False

    def cuInit(self, flags: Any) -> int:
        assert (type(flags), flags.value) == (ctypes.c_uint, 0)
        self._is_initialised = True
        return self._result

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        assert self._is_initialised
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int)).contents.value = 40 + ordinal.value
        return 0 if ordinal.value < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p)).contents.value = 7
        assert type(device) is ctypes.c_int
        self.retained.append(device.value)
        return 0


@pytest.mark.parametrize(
    "device, result, retained", [("cuda", 0, [40]), ("cuda:1", 0, [41]), ("cuda:2", 0, []), ("cuda", 100, [])]
)
def test_the_driver_makes_the_context_of_the_device_and_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, device: str, result: int, retained: list[int]
) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    drivers: list[Driver] = []

    def load(name: str) -> Driver:
        drivers.append(Driver(name, result))
        return drivers[0]

    thread = begin_opening(device, load)
    assert thread is not None
    thread.join(10)
    assert drivers[0].retained == retained


def test_devices_without_a_driver_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    for device in ("cpu", "cpu:0", "meta", "cuda:x"):
        assert begin_opening(device, Driver) is None

    def missing(_name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")

    thread = begin_opening("cuda", missing)
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
