"""A process knows the processors that it may use."""

from pathlib import Path

import pytest

from corolla.chassis.processors import available_cores


@pytest.mark.parametrize(
    "quota, most",
    [("100000 100000\n", 1), ("150000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", None), ("nonsense", None)],
)
def test_a_control_groups_share_limits_the_cores(tmp_path: Path, quota: str, most: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert available_cores(file) == (most or available_cores(tmp_path / "absent"))
