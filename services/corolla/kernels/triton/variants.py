"""Kernels with their constants, launched without Triton's search for what it has compiled.

To find it, Triton binds all arguments and constants of a call, describes each of them, and makes a text of the options.
For the kernels of small steps a host takes longer for that than a GPU takes to run them. A variant is made once for its
constants and options, so that a launch has to look at the other arguments alone.
"""

import functools
from typing import Any, Final

from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

Grid = tuple[int, ...]

_ALIGNED: Final = 16
_MOST: Final = 1 << 31


class Variant:
    """A kernel with constants and options. Any thread may launch it.

    The first launch of each kind goes through Triton, and later ones call what that had compiled. What Triton tells
    apart has different kinds here, too: devices, the dtypes of tensors, and whole numbers by whether they are 1, 16
    divides them, or neither. Triton launches by itself where 16 does not divide an address, a number has more than 32
    bits, a profiler watches, or the interpreter runs kernels.

    Args:
        kernel: what `triton.jit` made of a function, whose constants follow all other parameters.
        options: the constants by their names, and Triton's options.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._is_interpreted = not isinstance(kernel, JITFunction)

    def launch(self, grid: Grid, arguments: tuple[Any, ...]) -> None:
        """Launches the kernel on the current device, in its current stream.

        Args:
            grid: one to three sizes.
            arguments: tensors, numbers, and None, for all parameters before the constants.
        """
        if self._is_interpreted:
            self.kernel[grid](*arguments, **self.options)
            return
        active = driver.active
        device = active.get_current_device()
        kind, given = described(device, arguments)
        known = None if kind is None else self._known.get(kind)
        if known is None or _are_watched():
            compiled = self.kernel[grid](*arguments, **self.options)
            if kind is not None:
                constants = [self.options[name] for name in self.kernel.arg_names[len(arguments) :]]
                self._known[kind] = (compiled.run, compiled.function, compiled.packed_metadata, constants)
            return
        run, function, metadata, constants = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *given, *constants)


variant: Final = functools.lru_cache(maxsize=None, typed=True)(Variant)
"""The variant of a kernel with constants and options, always the same one."""


def described(device: int, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """The kind of a launch with these arguments, and the arguments with the addresses of tensors in their places.

    Args:
        device: the number of the device.
        arguments: tensors on it, numbers, and None.

    Returns:
        The kind, or None where Triton has to look at the arguments itself; then the others may be incomplete.
    """
    kind: list[Any] = [device]
    given: list[Any] = []
    for each in arguments:
        if isinstance(each, Tensor):
            kind.append(each.dtype)
            address = each.data_ptr()
            if address % _ALIGNED:
                return None, given
            given.append(address)
            continue
        if type(each) is int:
            if not -_MOST <= each < _MOST:
                return None, given
            kind.append((each == 1) - (each % _ALIGNED == 0))
        elif each is None or type(each) is float:
            kind.append(type(each))
        else:
            return None, given
        given.append(each)
    return tuple(kind), given


def _are_watched() -> bool:
    """Returns True if a profiler wants to know of each launch."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
