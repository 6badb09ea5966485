"""The memory of the machine that this process may still take. The module imports no torch."""

from pathlib import Path
from typing import Final

_MACHINE: Final = Path("/proc/meminfo")
_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(machine: Path = _MACHINE, control_group: Path = _CONTROL_GROUP) -> int | None:
    """Returns the bytes that this process could still allocate; None if the system does not say.

    It is the smaller of what the machine has available and what the limit of the process' control group leaves. File
    pages that the kernel would drop count as available.
    """
    left = []
    try:
        facts = dict(line.split(":", 1) for line in machine.read_text().splitlines())
        left.append(int(facts["MemAvailable"].split()[0]) << 10)
    except (OSError, ValueError, KeyError):
        pass
    try:
        limit = int((control_group / "memory.max").read_text())
        held = int((control_group / "memory.current").read_text())
        facts = dict(line.split(" ", 1) for line in (control_group / "memory.stat").read_text().splitlines())
        left.append(max(0, limit - held + int(facts.get("inactive_file", 0))))
    except (OSError, ValueError):
        pass  # no control group, or "max": no limit
    return min(left, default=None)
