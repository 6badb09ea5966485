"""The memory of a process between its start, after which most of it stays, and its end."""

import ctypes
import gc


def settle() -> None:
    """What is there now stays for long: the collector passes it over from now on, and the system gets what is free.

    Otherwise a step now and then would wait until the collector has been through all that was imported and loaded; and
    tokenizers, for one, leave more memory behind than they take.
    """
    gc.collect()
    gc.freeze()
    # Not every C library has it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release() -> None:
    """What was passed over may be gone: frees it."""
    gc.unfreeze()
    gc.collect()
