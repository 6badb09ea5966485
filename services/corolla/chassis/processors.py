"""The processors that this process may use, and how threads of OpenMP wait on them. The module imports no torch."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

OPENMP_WAITING: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""Environment variables to set before torch is imported. OpenMP's helper threads then wait for the next matrix product
for some 50 microseconds before they sleep.

With the policy alone, helpers sleep at once, and each of the hundred products of a step wakes them, which costs as much
time as they save. By default, helpers wait actively for milliseconds, which starves other processes on a small machine.
If a process has more helpers than processors, only the policy applies.
"""

_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def is_cpu(device: str) -> bool:
    """Returns whether a device of this torch name is the machine's own processor, as `cpu` and `cpu:0` are."""
    return device.partition(":")[0] == "cpu"


def available_cores(quota_file: Path = _CPU_QUOTA) -> int:
    """Returns the number of cores that this process may use, at least 1.

    It is the smaller of two numbers: the cores of the process' affinity, and the quota of its control group.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(num_cores, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):
        return num_cores  # no control group, or "max": no limit
