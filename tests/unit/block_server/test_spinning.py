"""Whether a server watches its sockets between two steps."""

import os
import time
from itertools import pairwise

import pytest

from corolla.block_server.spinning import Trial, measure_spin, spin_seconds


def test_a_server_watches_for_a_few_steps_where_that_pays() -> None:
    assert spin_seconds(Trial(0.0012, 0.001, 2.0), num_threads=1) == pytest.approx(0.004)


def test_long_steps_do_not_keep_a_processor_busy_for_longer_than_a_bound() -> None:
    assert spin_seconds(Trial(0.6, 0.5, 2.0), num_threads=1) == 0.02


@pytest.mark.parametrize(
    "trial, num_threads",
    [
        pytest.param(Trial(0.00104, 0.001, 8.0), 1, id="hardly faster"),
        pytest.param(Trial(0.0009, 0.001, 8.0), 1, id="slower"),
        pytest.param(Trial(0.002, 0.001, 1.0), 1, id="one processor"),
        pytest.param(Trial(0.002, 0.001, 1.7), 1, id="others use the second processor"),
        pytest.param(Trial(0.002, 0.001, 4.0), 4, id="all compute"),
    ],
)
def test_a_server_lets_its_processor_sleep_elsewhere(trial: Trial, num_threads: int) -> None:
    assert spin_seconds(trial, num_threads) == 0.0


def test_nothing_is_tried_without_time_or_without_a_processor_to_spare() -> None:
    def step() -> None:
        raise AssertionError("no step is computed")

    assert measure_spin(step, 1, budget_s=0.0) == 0.0
    assert measure_spin(step, 10_000, budget_s=1.0) == 0.0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="nothing tells which processors may be used")
def test_steps_are_tried_after_both_kinds_of_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.block_server.spinning.available_cores", lambda: 2)
    began: list[float] = []

    def step() -> None:
        began.append(time.perf_counter())

    assert 0.0 <= measure_spin(step, 1, budget_s=0.05) <= 0.02
    assert len(began) >= 2 + 2 * 5
    assert min(later - earlier for earlier, later in pairwise(began[2:])) >= 0.001
