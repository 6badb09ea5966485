"""Tries kernels that choose tokens when a device first needs them; where one fails, operators take its place."""

import logging
from collections.abc import Callable

import torch

from corolla.kernels.kernel_trial import failure_of
from corolla.kernels.triton.availability import missing

log = logging.getLogger(__name__)


def holds(kernel: str, otherwise: str, device: torch.device, has_equal_results: Callable[[torch.device], bool]) -> bool:
    """Tries a kernel on a device, and logs what fails. On a CPU no kernel holds.

    Args:
        kernel: what it is for.
        otherwise: what takes its place.
        has_equal_results: runs the kernel on the device, and says whether its results are those of operators.
    """
    if device.type != "cuda":
        return False
    failure = missing() or failed_trial(device, has_equal_results)
    if failure is not None:
        log.warning("a kernel is not used", extra={"kernel": kernel, "otherwise": otherwise, "failure": failure})
    return failure is None


def failed_trial(device: torch.device, has_equal_results: Callable[[torch.device], bool]) -> str | None:
    """Returns what failed, or None; see `holds`."""
    return failure_of(lambda: None if has_equal_results(device) else "its results differ")
