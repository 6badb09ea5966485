"""How long each test file takes, and the time that each stage of the gate may take.

    python -m tests.durations           checks that the stages keep to their budgets
    make durations ARGS=tests/unit/wire measures these files anew, on this machine

`durations.json` has the seconds of each file by the marks of its tests, as workers took them with `make`'s number of
workers. A test that comes later has to be measured, and a stage that is over its budget has to lose something else.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.tiers import NUM_QUARTERS

ROOT: Final = Path(__file__).resolve().parents[1]
PATH: Final = ROOT / "tests" / "durations.json"
NUM_WORKERS: Final = 3
"""`JOBS` of the Makefile."""
NUM_FAULT_ROWS: Final = 2
"""Rows of faults that run at a time."""

BUDGETS_S: Final = {"make test": 482, "gate: tests": 1138, "gate: faults": 190, "gate: cluster": 640}
"""Seconds on two cores with AVX-512. They only ever become smaller. Setup and `make verify` take three minutes more.

Seconds of unmarked tests were measured by `make test` alone, those of the others beside heavier tests.
"""

Seconds = dict[str, float]
"""The seconds of one file by mark: "quick", "kind" or "full"."""


def mark_of(report: pytest.TestReport) -> str:
    return next((mark for mark in ("full", "kind") if mark in report.keywords), "quick")


def add(seconds: dict[str, Seconds], report: pytest.TestReport) -> None:
    """Counts a phase of a test for its file."""
    of_file = seconds.setdefault(report.nodeid.partition("::")[0], {})
    of_file[mark_of(report)] = of_file.get(mark_of(report), 0.0) + report.duration


def record(path: Path, measured: Mapping[str, Seconds]) -> None:
    """Writes what was measured over what the file had, and leaves out files that are gone."""
    kept: dict[str, Seconds] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, seconds in measured.items():
        kept[name] = {mark: round(value, 1) for mark, value in sorted(seconds.items())}
    lines = [f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept) if (ROOT / name).exists()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def stages_s(durations: Mapping[str, Seconds]) -> dict[str, float]:
    """The seconds of each stage, for those who wait for it."""
    totals = dict.fromkeys(BUDGETS_S, 0.0)
    for name, seconds in durations.items():
        quick, kinds, full = (seconds.get(mark, 0.0) for mark in ("quick", "kind", "full"))
        if name.startswith("tests/faults/"):
            totals["gate: faults"] += quick / NUM_FAULT_ROWS
        elif name.startswith("tests/cluster/"):
            totals["gate: cluster"] += quick
        else:
            totals["make test"] += quick / NUM_WORKERS
            totals["gate: tests"] += (quick + kinds + full / NUM_QUARTERS) / NUM_WORKERS
    return totals


def test_files() -> Iterable[str]:
    return (str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def faults_of(durations: Mapping[str, Seconds], files: Iterable[str]) -> list[str]:
    """Sentences about what does not hold."""
    unmeasured = sorted(set(files) - durations.keys())
    faults = [f"{name} was never measured: make durations ARGS={name}" for name in unmeasured]
    for stage, seconds in stages_s(durations).items():
        if seconds > BUDGETS_S[stage]:
            faults.append(f"{stage} takes {seconds:.0f} s, and may take {BUDGETS_S[stage]} s: something has to go")
    return faults


def main() -> int:
    durations: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    for stage, seconds in stages_s(durations).items():
        sys.stdout.write(f"{stage:<14} {seconds:5.0f} of {BUDGETS_S[stage]} s\n")
    faults = faults_of(durations, test_files())
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
