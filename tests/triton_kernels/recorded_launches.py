"""Recorded decode steps with Triton kernels: launches are recorded with the tensors and numbers that they got."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from corolla.kernels.triton import expert_launches, launches, state_launches
from corolla.kernels.triton.variants import Grid, Variant
from tests.recorded_steps import PlacesOfTensors, Recorder, run_without_keeping


def record(step: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
    """A `Record` of operators and launches. A replay launches on the same addresses, with the numbers of the recording.

    Raises:
        RuntimeError: the step does something that no capture allows.
        TypeError: a launch gets an argument that a GPU's launcher refuses.
    """
    warm_up()
    run_without_keeping(step)
    launch = launches.launch
    recorder = Recorder()

    def recorded(of: Variant, grid: Grid, *arguments: Any) -> None:
        _check(grid, arguments)
        recorder.is_paused = True
        launch(of, grid, *arguments)
        recorder.is_paused = False
        recorder.add(launch, (of, grid, *arguments), {})

    with pytest.MonkeyPatch.context() as patch, PlacesOfTensors(recorder), recorder:
        for module in (launches, expert_launches, state_launches):
            patch.setattr(module, "launch", recorded)
        step()
    return recorder.replay


def _check(grid: Grid, arguments: tuple[Any, ...]) -> None:
    if not 1 <= len(grid) <= 3 or any(type(size) is not int or size < 1 for size in grid):
        raise TypeError(f"a grid has one to three positive sizes, not {grid}")
    if any(size > 65_535 for size in grid[1:]):
        raise TypeError(f"the second and third size of a grid are at most 65,535, not {grid}")
    for each in arguments:
        if isinstance(each, torch.Tensor):
            if not each.numel():
                raise TypeError("a kernel gets a tensor without memory")
        elif each is not None and not isinstance(each, int | float):  # None is a constant of the kernel
            raise TypeError(f"a kernel gets no {type(each).__name__}")
