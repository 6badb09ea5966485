"""Compiles LLVM's text (LLVM IR) for this processor. llvmlite contains the compiler; the machine needs no other one."""

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

_LOCK: Final = threading.Lock()


def why_unavailable() -> str | None:
    """The reason why this machine cannot compile functions; None: it can."""
    try:
        import llvmlite.binding  # noqa: F401
    except ImportError:
        return "llvmlite is not installed (`pip install llvmlite`)"
    features = processor_features()
    if "avx" in features and not (features.get("f16c") and features.get("fma")):
        return "this processor lacks FMA and F16C, which x86 has since 2013"
    return None


@functools.cache
def processor_features() -> Mapping[str, bool]:
    """Maps LLVM's name of each instruction set to whether this processor has it."""
    return dict(_library().get_host_cpu_features())


def max_sums() -> int:
    """How many vectors of 16 sums fit into this processor's registers next to the operands of the products.

    AVX-512 has 32 registers that each hold a whole vector. Other processors have 16 that each hold half a vector (AVX),
    or 32 that each hold a quarter (Arm).
    """
    return 24 if processor_features().get("avx512f") else 6


class Compiled:
    """The compiled functions of one LLVM module.

    Args:
        source: the module, as LLVM's text.

    Attributes:
        address: returns the address of a function by its name; the address is valid as long as this object lives.
    """

    def __init__(self, source: str) -> None:
        with _LOCK:
            self._engine = _compiled(source)
        self.address: Callable[[str], int] = functools.cache(self._engine.get_function_address)


def in_threads(function: int, argument: int, num_threads: int) -> None:
    """Calls a compiled function once in each of `num_threads` threads, at the same time.

    The threads are those of torch's OpenMP, so that the process has only one pool of them. Where torch has another
    OpenMP than GNU's, the function is called only once, and has to do the whole work.

    Args:
        function: the address of a function with one pointer as its argument.
        argument: the pointer.
    """
    parallel = _parallel()
    if parallel is None or num_threads <= 1:
        _Team(function)(argument)
    else:
        parallel(function, argument, num_threads, 0)


def share(function: int, job: int, num_items: int, num_threads: int) -> None:
    """Lets threads take the items of a job one by one, the last item first.

    When items are parts of a prompt's chunk, the last ones attend to the most keys, so they take the longest.

    Args:
        function: the address of a function whose arguments are the job and the number of an item.
        job: the address of the job.
    """
    call = (ctypes.c_int64 * 4)(function, job, num_items, 0)
    in_threads(_taking().address("take_all"), ctypes.addressof(call), num_threads)


_Team: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_TAKING: Final = """\
define void @take_all(ptr %call) nounwind {
  %function = load ptr, ptr %call
  %job_at = getelementptr ptr, ptr %call, i64 1
  %job = load ptr, ptr %job_at
  %items_at = getelementptr i64, ptr %call, i64 2
  %items = load i64, ptr %items_at
  %taken = getelementptr i64, ptr %call, i64 3
  br label %take
take:
  %number = atomicrmw add ptr %taken, i64 1 monotonic
  %is_one = icmp ult i64 %number, %items
  br i1 %is_one, label %one, label %done
one:
  %after = sub i64 %items, %number
  %item = sub i64 %after, 1
  call void %function(ptr %job, i64 %item)
  br label %take
done:
  ret void
}
"""


@functools.cache
def _taking() -> Compiled:
    return Compiled(_TAKING)


@functools.cache
def _parallel() -> Any:
    """The function `GOMP_parallel` of torch's OpenMP library; None where torch has no GNU OpenMP."""
    folder = Path(torch.__file__).parent
    places = (*sorted((folder / "lib").glob("libgomp*")), *sorted(folder.with_name("torch.libs").glob("libgomp*")))
    if not places:
        return None
    parallel = ctypes.CDLL(str(places[0])).GOMP_parallel
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


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
