"""A process dies at its configured failpoint, and nowhere without one."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corolla.chassis import failpoints
from corolla.chassis.errors import SettingsError

PASSES = """
import os
from corolla.chassis import failpoints
failpoints.arm(os.environ)
for number in range(5):
    failpoints.passed("before_send")
    print(number, flush=True)
    failpoints.passed("after_send")
"""


@pytest.mark.parametrize(
    "given, num_printed", [("", 5), ("before_send", 0), ("before_send:3", 2), ("after_send:3", 3), ("after_send:6", 5)]
)
def test_a_process_dies_at_the_place_and_count_that_it_was_given(given: str, num_printed: int) -> None:
    ended = subprocess.run([sys.executable, "-c", PASSES], env=_environment(given), capture_output=True, check=False)
    assert len(ended.stdout.split()) == num_printed
    assert ended.returncode == (0 if num_printed == 5 else -signal.SIGKILL)


def test_a_place_counts_from_when_the_named_file_exists(tmp_path: Path) -> None:
    starting_file = tmp_path / "now"
    passes = PASSES.replace("    print", f"    if number == 1: open({str(starting_file)!r}, 'w').close()\n    print")
    environment = _environment(f"before_send:2@{starting_file}")
    ended = subprocess.run([sys.executable, "-c", passes], env=environment, capture_output=True, check=False)
    assert ended.stdout.split() == [b"0", b"1", b"2"]


def _environment(given: str) -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), failpoints.VARIABLE: given}


@pytest.mark.parametrize(
    "given",
    [
        "nowhere", "before_send:0", "before_send:x", "before_send:1:2", ":3", "fail:before_send", "fail:engine:0",
        "engine:1",
    ],
)  # fmt: skip
def test_an_unknown_place_or_task_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=failpoints.VARIABLE):
        failpoints.arm({failpoints.VARIABLE: given})
