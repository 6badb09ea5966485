"""The driver of NVIDIA's GPUs: whether it is recent enough, and how it is opened while Python imports torch.

Both take seconds, and the calls here leave Python free.
"""

import ctypes
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_LIBRARY: Final = "libcuda.so.1"
# Torch sets it before it opens the driver, too: kernels of libraries are loaded when they first run.
_LAZY_LOADING: Final = ("CUDA_MODULE_LOADING", "LAZY")
_KERNEL_MODULE: Final = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS: Final = {12: "525", 13: "580"}
"""The first driver that runs programs of each major version of CUDA, by NVIDIA's table of CUDA's compatibility."""


def driver_version(kernel_module: Path = _KERNEL_MODULE) -> str | None:
    """The version of the driver, such as `580.65.06`; None if this machine does not say."""
    try:
        match = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)\b", kernel_module.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match and match[1]


def why_driver_fails(
    built_for: str, load_library: Callable[[str], Any] = ctypes.CDLL, kernel_module: Path = _KERNEL_MODULE
) -> str | None:
    """Says what keeps programs built for a version of CUDA from running with this machine's driver; None: nothing.

    Args:
        built_for: a version of CUDA such as `13.0`.
        load_library: loads the driver's library.
        kernel_module: the file in which the driver names its version.
    """
    wanted = int(built_for.partition(".")[0])
    least = _LEAST_DRIVERS.get(wanted)
    needed = f"torch is built for CUDA {built_for}, which needs NVIDIA's driver{f' {least} or later' if least else ''}"
    version = ctypes.c_int()
    try:
        failed = load_library(_LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return (
            f"{needed}, and there is none here ({_LIBRARY} is not found); install it, and let the container have the "
            "GPU (docker run --gpus all; gpu.count and runtimeClassName in the chart)"
        )
    if failed or version.value // 1000 >= wanted:
        return None  # what else is wrong is found when the device is opened
    has = f"{version.value // 1000}.{version.value % 1000 // 10}"
    found = driver_version(kernel_module)
    return f"{needed}, and the driver here{f', {found},' if found else ''} goes up to CUDA {has}; update it here"


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
