"""A launch that calls what Triton had compiled gives the device what Triton's own launch gives it.

Kernels are compiled for a GPU that is not here; a stand-in for its driver keeps what it is told to launch.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from corolla.kernels.triton.compilation import SHARED_MEMORY
from corolla.kernels.triton.device_code import gate
from corolla.kernels.triton.launches import launch
from corolla.kernels.triton.variants import Variant

CONSTANTS = {"ACTIVATION": "relu2", "GATES": True, "BLOCK": 64}


class Launcher:
    """What Triton makes of a kernel, to be called for each launch."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, _source: Any, _metadata: Any) -> None:
        pass

    def __call__(self, *call: Any) -> None:
        self.calls.append(call)


class Device:
    """The parts of a driver that launches need; each kernel that is loaded has a handle of its own."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = self
        self.device, self.num_loaded = 0, 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 700 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[90]}

    def load_binary(self, *_binary: Any) -> tuple[int, int, int, int, int]:
        self.num_loaded += 1
        return 1, self.num_loaded, 32, 0, 1024


class Gate(Variant):
    """Counts the launches for which it asks Triton."""

    def __init__(self) -> None:
        super().__init__(gate, **CONSTANTS, num_warps=4)
        self.num_asked = 0
        self.kernel = self

    arg_names = gate.arg_names

    def __getitem__(self, grid: Any) -> Any:
        self.num_asked += 1
        return gate[grid]


@pytest.fixture
def device() -> Iterator[Device]:
    driver.set_active(standing_in := Device())
    gate.device_caches.clear()
    Launcher.calls.clear()
    yield standing_in
    driver.set_active(None)


def arguments(dtype: torch.dtype = torch.bfloat16, width: int = 64) -> tuple[Any, ...]:
    rows = torch.zeros(2, 2 * width, dtype=dtype)
    return rows, rows[:, width:], torch.zeros(2, width, dtype=dtype), 2 * width, width


def addresses(call: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in call)


def test_a_repeated_launch_is_that_of_triton(device: Device) -> None:
    of, given = Gate(), arguments()
    for _ in range(3):
        launch(of, (2, 1), *given)
    assert of.num_asked == 1
    by_triton, *others = Launcher.calls
    # x, y and z, stream, kernel, metadata; what describes the launch to two hooks, and these; arguments and constants.
    assert by_triton[:5] == (2, 1, 1, 700, 1)
    assert by_triton[9:] == (*given, *CONSTANTS.values())
    expected = (*by_triton[:6], None, None, None, *addresses(by_triton[9:]))
    assert others == [expected, expected]


def test_what_triton_compiles_anew_is_not_launched_as_something_else(device: Device) -> None:
    of, odd = Gate(), arguments(width=24)
    misaligned = torch.zeros(129, dtype=torch.bfloat16)[1:].view(1, 128)
    launches = [
        arguments(), arguments(torch.float32), odd, (misaligned, *arguments()[1:]), (*arguments()[:3], 1, 64)
    ]  # fmt: skip
    for given in launches * 2:
        launch(of, (2,), *given)
    kernels = [call[4] for call in Launcher.calls]
    assert kernels[: len(launches)] == kernels[len(launches) :]
    assert len(set(kernels)) == len(launches)
    # Triton always looks at addresses that 16 does not divide.
    assert of.num_asked == len(launches) + 1


def test_each_device_has_its_own_kernel_and_stream(device: Device) -> None:
    of = Gate()
    for device.device in (0, 1, 0, 1):
        launch(of, (1,), *arguments())
    assert [call[3:5] for call in Launcher.calls] == [(700, 1), (701, 2)] * 2
    assert of.num_asked == 2


def test_a_profiler_sees_every_launch(device: Device) -> None:
    of = Gate()
    seen: list[Any] = []
    launch(of, (1,), *arguments())
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        launch(of, (1,), *arguments())
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    launch(of, (1,), *arguments())
    assert of.num_asked == 2
    assert [call[7] is None for call in Launcher.calls] == [False, False, True]
