"""The memory that a process may still take, by the machine and by its control group."""

from pathlib import Path

import pytest

from corolla.chassis.host_memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal:       {64 << 20} kB\nMemFree:         {1 << 20} kB\nMemAvailable:   {32 << 20} kB\n")
    return file


@pytest.mark.parametrize("limit, expected", [(str(8 * GIB), 6 * GIB), (str(100 * GIB), 32 * GIB), ("max", 32 * GIB)])
def test_the_tighter_limit_counts(machine: Path, tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {GIB}\n")
    assert available_bytes(machine, tmp_path) == expected


def test_a_machine_without_control_groups_has_what_it_says(machine: Path, tmp_path: Path) -> None:
    assert available_bytes(machine, tmp_path / "none") == 32 * GIB


def test_a_system_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_this_machine_has_memory() -> None:
    available = available_bytes()
    assert available is not None
    assert available > 0
