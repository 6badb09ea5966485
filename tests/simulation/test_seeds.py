"""Five hundred seeds hold; a seed gives the same run again; what the simulation stands on is what it says it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.run import replay_command, run
from tests.simulation.scenario import draw

NUM_SEEDS = 500
NUM_PARTS = 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_seeds_hold(part: int) -> None:
    for seed in range(part * NUM_SEEDS // NUM_PARTS, (part + 1) * NUM_SEEDS // NUM_PARTS):
        report = run(seed)
        assert not report.broken, "\n".join((*report.broken, f"replay: {replay_command(seed)}"))


def test_the_command_that_is_printed_repeats_the_run_whatever_the_hash_seed() -> None:
    seed = next(seed for seed in range(100) if draw(seed).has("kill") and draw(seed).has("freeze", "cut"))
    root = Path(__file__).resolve().parents[2]
    for hash_seed in ("1", "2"):
        command = replay_command(seed).split()
        shown = subprocess.run(
            [sys.executable, *command[1:]], cwd=root, env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert run(seed).digest in shown


def test_most_seeds_break_something_and_are_survived() -> None:
    scenarios = [draw(seed) for seed in range(NUM_SEEDS)]
    assert sum(scenario.keeps_coverage and bool(scenario.faults) for scenario in scenarios) > NUM_SEEDS // 2
    kinds = {fault.kind for scenario in scenarios for fault in scenario.faults}
    assert {"kill", "freeze", "cut", "cut peer", "reset", "slow", "repeat", "bad numbers", "drain"} <= kinds
    assert {"router kill", "redis gone", "redis frozen", "redis flush", "redis rollback", "redis full"} <= kinds
    assert {"client kill", "client freeze", "cancel"} <= kinds
