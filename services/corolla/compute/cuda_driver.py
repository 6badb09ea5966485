"""Opens the driver of a GPU while Python imports torch. Both take seconds, and the calls here leave Python free."""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, Final

_LIBRARY: Final = "libcuda.so.1"
# Torch sets it before it opens the driver, too: kernels of libraries are loaded when they first run.
_LAZY_LOADING: Final = ("CUDA_MODULE_LOADING", "LAZY")


def begin_opening(device: str, load_library: Callable[[str], Any] = ctypes.CDLL) -> threading.Thread | None:
    """Begins to make the context of a GPU, in which torch computes later.

    Nothing is reported here: `open_device` finds again what fails, and says what to do about it.

    Args:
        device: a torch name such as `cuda` or `cuda:1`.
        load_library: loads the driver's library.

    Returns:
        The thread that does it; None for a device without this driver.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        return None
    os.environ.setdefault(*_LAZY_LOADING)
    thread = threading.Thread(target=_open, args=(int(number or 0), load_library), name="cuda_driver", daemon=True)
    thread.start()
    return thread


def _open(number: int, load_library: Callable[[str], Any]) -> None:
    try:
        driver = load_library(_LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(ctypes.c_uint(0)) or driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(number)):
        return
    # The process keeps this reference, and with it the context, until it ends.
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
