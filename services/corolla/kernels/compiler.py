"""Compiles LLVM's text for the processor that it runs on. llvmlite brings the compiler; there need be no other."""

import ctypes
import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

_OPENMP: Final = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_LOCK: Final = threading.Lock()


def objection() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    try:
        import llvmlite.binding  # noqa: F401
    except ImportError:
        return "llvmlite is not installed (`pip install 'corolla[packed]'`)"
    features = processor_features()
    if "avx" in features and not (features.get("f16c") and features.get("fma")):
        return "this processor lacks FMA and F16C, which x86 has since 2013"
    return None


@functools.cache
def processor_features() -> Mapping[str, bool]:
    """Of instructions: name, as LLVM has it -> whether this processor has them."""
    return dict(_library().get_host_cpu_features())


def max_sums() -> int:
    """Vectors of 16 sums that fit this processor's registers next to what is multiplied: of 32 or of 16 that a vector
    fills, or of 16 or 32 that are a half or a quarter of one."""
    return 24 if processor_features().get("avx512f") else 6


@functools.cache
def has_openmp() -> bool:
    """Whether compiled functions can call torch's own OpenMP, so that both share threads."""
    folder, llvm = Path(torch.__file__).parent, _library()
    for path in (*sorted((folder / "lib").glob("libgomp*")), *sorted(folder.with_name("torch.libs").glob("libgomp*"))):
        library = ctypes.CDLL(str(path))
        for name in _OPENMP:
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        return True
    return False


class Compiled:
    """Functions of a module.

    Args:
        source: a module, as LLVM's text; its functions may call OpenMP where `has_openmp`.
    """

    def __init__(self, source: str) -> None:
        with _LOCK:
            self._engine = _compiled(source)

    def function(self, name: str, *arguments: Any) -> Any:
        """One that returns nothing, and keeps the module. The interpreter's lock is released while it runs.

        Args:
            arguments: their types, of ctypes.
        """
        function: Any = ctypes.CFUNCTYPE(None, *arguments)(self.address(name))
        function.module = self
        return function

    def address(self, name: str) -> int:
        """Of a function, for other compiled ones; as long as the module is kept."""
        found: int = self._engine.get_function_address(name)
        return found


def _compiled(source: str) -> Any:
    llvm = _library()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, jit=True
    )
    module = llvm.parse_assembly(source)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _library() -> Any:
    import llvmlite.binding

    return llvmlite.binding
