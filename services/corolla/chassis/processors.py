"""The processors that this process may use, and how threads of OpenMP wait on them. Loads no torch."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

OPENMP_WAITING: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""To be set before torch is imported: helpers wait for the next product for some 50 microseconds, and then sleep.

Helpers that sleep at once, as the policy alone says, are woken for each of the hundred products of a step, which takes
as long as they save; those that wait for milliseconds, as they do by themselves, starve neighbours on a small machine.
Where a process has more of them than processors, the policy holds.
"""

_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def available_cores(quota_file: Path = _CPU_QUOTA) -> int:
    """Cores that this process may use: those it may run on, or fewer where its control group has a smaller share."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(num_cores, math.floor(int(quota) / int(period))))
    except (OSError, ValueError):
        return num_cores  # no control group, or "max": no limit
