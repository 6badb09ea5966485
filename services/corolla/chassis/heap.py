"""Settings of the memory allocator and the garbage collector while a process loads and while it serves."""

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MAP_THRESHOLD: Final = -3
_LOADING_BYTES: Final = 128 << 10
# glibc raises its threshold to this value by itself once a block of that size is freed.
_SERVING_BYTES: Final = 32 << 20

_YOUNG_BEFORE_ALL: Final = 100
"""So many collections of young objects come before one of all objects; 10 by default."""

_is_loading = False


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Pauses the garbage collector while modules are imported, and excludes the objects they made from collection.

    Imports create long-lived objects and hardly any garbage. The collector would take a sixth of the processor time
    of a block server's imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def expect_loading() -> None:
    """Makes the allocator map large blocks one by one, and unmap them when freed, until `settle` is called.

    A model's weights pass through several forms while they are loaded. Otherwise the memory of earlier forms would stay
    with the process, in holes that are too small for the later forms.
    """
    global _is_loading
    _is_loading = True
    _call("mallopt", _MAP_THRESHOLD, _LOADING_BYTES)


def settle() -> None:
    """Excludes all present objects from garbage collection, and returns free memory to the system.

    Call it when the service is loaded. Otherwise some steps would wait while the collector visits every imported and
    loaded object. Later it visits all that is left then less often than Python would have it do: the objects of 2,500
    sessions take it a fifth of a second, in which the event loop stands still, and hardly any are parts of cycles. Some
    libraries, such as tokenizers, leave more freed memory in the process than they use.
    """
    global _is_loading
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_BEFORE_ALL)
    if _is_loading:
        _is_loading = False
        _call("mallopt", _MAP_THRESHOLD, _SERVING_BYTES)
        _call("mallopt", _TRIM_THRESHOLD, 2 * _SERVING_BYTES)
    _call("malloc_trim", 0)


def release() -> None:
    """Collects what is unused now, also among objects that `settle` has excluded. The others stay excluded.

    So the next call of `settle` visits only what is made in between: to visit what a block server imports takes 0.3 s.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


HUGE_PAGE_BYTES: Final = 2 << 20


def discard(address: int, num_bytes: int) -> None:
    """Discards the content of allocated memory: its whole pages go back to the system, and read as zeros afterwards."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        _call("madvise", ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Asks the system to use pages of `HUGE_PAGE_BYTES` for this memory, wherever a whole one fits.

    Call it before anything is written to the memory. With small pages, a processor that reads memory from end to end
    may spend a seventh of its time on the translation of addresses. Nothing changes on systems without huge pages.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < end and hasattr(mmap, "MADV_HUGEPAGE"):
        _call("madvise", ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


def _call(name: str, *arguments: Any) -> None:
    # Not every C library has every function.
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
