"""Opens the device that a server computes with, and reports what does not fit into its memory."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from corolla.chassis.errors import StartupError
from corolla.compute.cuda_driver import driver_version, why_driver_fails
from corolla.compute.device_memory import DeviceMemory

# torch raises OutOfMemoryError only where its own allocator lacks memory of a GPU. On the CPU, and where the driver or
# a library takes memory (for a kernel that it loads, a recording, a workspace), only the text of the error tells.
_OUT_OF_MEMORY: Final = ("can't allocate memory", "not enough memory", "out of memory", "_ALLOC_FAILED")


def is_out_of_memory(failure: BaseException) -> bool:
    """The exception says that memory, of the device or of the host, is too small."""
    return isinstance(failure, torch.OutOfMemoryError | MemoryError) or (
        isinstance(failure, RuntimeError) and any(text in str(failure) for text in _OUT_OF_MEMORY)
    )


def open_device(name: str) -> torch.device:
    """The device of this name, after a first computation on it. From now on, torch rounds half-precision sums once.

    The calling thread launches there what does not name a device, as Triton does: each thread has a device of its own.

    Args:
        name: a name that torch knows, such as `cpu`, `cuda` or `cuda:1`.

    Raises:
        StartupError: there is no such device here, or it does not compute.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(
            f"COROLLA_DEVICE={name} is not the name of a device: set it to cpu, cuda or cuda:1"
        ) from None
    if device.type == "cuda" and torch.version.cuda and (reason := why_driver_fails(torch.version.cuda)):
        raise StartupError(f"COROLLA_DEVICE={name} cannot be used: {reason}")
    try:
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        torch.ones(8, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        raise StartupError(f"COROLLA_DEVICE={name} cannot be used: {_reason(device, failure)}") from None
    # Otherwise products in half precision may round partial sums, and cuDNN may cut mantissas of float32 to 10 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    # cuDNN's attention makes a plan for each length of text, which takes longer than the attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def device_name(device: torch.device) -> str:
    """What people call a device, and its memory and its driver's version where it has some of its own."""
    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    driver = f", driver {version}" if (version := driver_version()) else ""
    return f"{device}: {facts.name}, {facts.total_memory / 2**30:.1f} GiB{driver}"


def num_devices(kind: str) -> int:
    """How many devices of a kind, such as `cuda`, this machine has, at least 1.

    Raises:
        StartupError: there is none, or it does not compute.
    """
    open_device(kind)
    return max(1, int(torch.get_device_module(kind).device_count()))


def _reason(device: torch.device, failure: BaseException) -> str:
    first_line = str(failure).strip().partition("\n")[0].rstrip(".")
    if device.type != "cuda" or is_out_of_memory(failure):
        return first_line
    if torch.version.cuda is None:
        return (
            "this build of torch computes on CPUs only; install the other one with `make setup TORCH_VARIANT=cuda`, or "
            "build the image with --build-arg TORCH_VARIANT=cuda"
        )
    if not (number := torch.cuda.device_count()):
        return f"torch finds no device ({first_line}); `nvidia-smi` shows whether the driver does"
    return f"torch finds {number} device{'s' if number > 1 else ''} ({first_line})"


@contextmanager
def memory_for(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turns a lack of memory within the context into a StartupError that says what to change.

    Args:
        what: what the memory is for, as the subject of a sentence in the plural.
        device: the device whose memory is used.
        advice: what an operator can change, as a part of a sentence.

    Raises:
        StartupError: an exception within the context says that memory is too small.
    """
    try:
        yield
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        where = "this machine" if device.type == "cpu" else str(device)
        raise StartupError(f"{what} do not fit into the memory of {where}{_free(device)}: {advice}") from None


def device_id(device: torch.device) -> str:
    """Identifies a GPU among all GPUs, also for processes on other machines; empty for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device, after all that this process no longer uses was given back; None unless it is a GPU."""
    if device.type != "cuda":
        return None
    give_back(device)
    return memory_now(device)


def give_back(device: torch.device) -> None:
    """Gives memory back that this process no longer uses, also what only the frames of an exception still hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_now(device: torch.device) -> DeviceMemory:
    """The memory of a GPU as it is. Any thread may call this."""
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def reserved_bytes(device: torch.device) -> int:
    """All bytes of a GPU that torch's allocator holds for this process, used or kept for later. Any thread may call."""
    return int(torch.cuda.memory_reserved(device))


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f" ({free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now)"
