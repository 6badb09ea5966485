"""What common GPUs have, as their data sheets say. Pure."""

from dataclasses import dataclass
from typing import Final

from corolla.compute.sizing import MIB


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        name: what people call it.
        memory_bytes: the memory that a process finds there.
        bandwidth: bytes per second that it reads; None: not known.
    """

    name: str
    memory_bytes: int
    bandwidth: float | None


GPUS: Final = {
    name: DeviceKind(name, mib * MIB, gigabytes_per_second * 1e9)
    for name, mib, gigabytes_per_second in (
        ("t4", 15360, 320), ("l4", 23034, 300), ("a10g", 23028, 600), ("rtx4090", 24564, 1008), ("l40s", 46068, 864),
        ("a100-40", 40960, 1555), ("a100-80", 81920, 2039), ("h100", 81559, 3350), ("h200", 143771, 4800),
        ("b200", 183359, 8000),
    )
}  # fmt: skip
"""Kinds by the names that `corolla plan --gpu` takes; memory as nvidia-smi shows it."""
