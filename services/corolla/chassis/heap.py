"""The memory of a process between its start, after which most of it stays, and its end."""

import ctypes
import gc
import mmap
from collections.abc import Callable
from typing import Any, Final

# Options of glibc's mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MAP_THRESHOLD: Final = -3
_LOADING_BYTES: Final = 128 << 10
# What glibc itself arrives at, once as much was freed at a time.
_SERVING_BYTES: Final = 32 << 20

_is_loading = False


def expect_loading() -> None:
    """Until the process settles, large pieces of memory come from the system one by one, and go back when freed.

    A model passes through several forms while it is loaded. Otherwise what the earlier ones took would stay, in holes
    that the later ones do not fit.
    """
    global _is_loading
    _is_loading = True
    _call("mallopt", _MAP_THRESHOLD, _LOADING_BYTES)


def settle() -> None:
    """What is there now stays for long: the collector passes it over from now on, and the system gets what is free.

    Otherwise a step now and then would wait until the collector has been through all that was imported and loaded; and
    tokenizers, for one, leave more memory behind than they take.
    """
    global _is_loading
    gc.collect()
    gc.freeze()
    if _is_loading:
        _is_loading = False
        _call("mallopt", _MAP_THRESHOLD, _SERVING_BYTES)
        _call("mallopt", _TRIM_THRESHOLD, 2 * _SERVING_BYTES)
    _call("malloc_trim", 0)


def release() -> None:
    """What was passed over may be gone: frees it."""
    gc.unfreeze()
    gc.collect()


HUGE_PAGE_BYTES: Final = 2 << 20


def discard(address: int, num_bytes: int) -> None:
    """The system gets a part of memory that is not freed yet, which nobody reads any more: it would find zeros."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        _call("madvise", ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Asks the system for pages of `HUGE_PAGE_BYTES` where a part of memory has room for whole ones.

    To be called before anything is written there. Addresses of memory that is read from end to end take a processor
    up to a seventh of its time otherwise. Systems without such pages, or that never give any, leave it as it is.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < end and hasattr(mmap, "MADV_HUGEPAGE"):
        _call("madvise", ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


def _call(name: str, *arguments: Any) -> None:
    # Not every C library has it.
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
