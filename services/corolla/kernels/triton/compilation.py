"""Compiles kernels for devices that are not here, so that a server does not compile while it starts.

Triton keeps what it compiles in the folder TRITON_CACHE_DIR, by the kernel's text, its types and constants, and the
device's architecture. A server with the same Triton finds it there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

# Bytes of shared memory that a block of an architecture may ask for (CUDA C++ Programming Guide, compute capabilities).
SHARED_MEMORY: Final = {
    80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376,
}  # fmt: skip
"""The architectures that kernels can be compiled for, as compute capabilities without the point."""


@dataclass(slots=True)
class Compilation:
    """The kernels that were compiled within a context.

    Attributes:
        arch: a key of SHARED_MEMORY.
        code_bytes: the size of each kernel's machine code, by the hash of what it was compiled from.
    """

    arch: int
    code_bytes: dict[str, int] = field(default_factory=dict)

    def compile(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles a kernel for these arguments; tensors may lie on the meta device."""
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        self.code_bytes[compiled.hash] = len(compiled.asm["cubin"])


current: Final[ContextVar[Compilation | None]] = ContextVar("compilation", default=None)
"""The compilation that takes the place of launches; None: kernels are launched."""


class _Device:
    """Stands in for Triton's driver of a device, as far as compiling asks it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by this number, too.
        return int(self._target.arch)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextmanager
def compiling(arch: int) -> Iterator[Compilation]:
    """Within this context, launches compile for an architecture instead of running; no device is needed.

    Args:
        arch: a key of SHARED_MEMORY.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Device(GPUTarget("cuda", arch, 32)))
    token = current.set(compilation := Compilation(arch))
    try:
        yield compilation
    finally:
        current.reset(token)
