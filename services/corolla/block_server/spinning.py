"""Whether a server watches its sockets between two steps, or lets its processor sleep: measured at start.

A processor that has slept is slow to wake, and computes more slowly for a while; to watch keeps one busy for nothing.
So a server watches only where that makes its steps clearly faster, and where a processor is idle apart from those it
computes with: on a machine that others use, they would pay for it.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from corolla.chassis.processors import available_cores

_MIN_GAIN: Final = 1.05
"""So many times faster a step must be. Less is lost in what the machine does otherwise."""

_MIN_SPARE: Final = 0.9
"""Processors apart from those that compute, less what a machine that does nothing else does."""

_STEPS_WATCHED: Final = 4
"""For as long as so many steps a server watches at most: the other hops of a chain take about as long together."""

_LONGEST_S: Final = 0.02
_SHORTEST_PAUSE_S: Final = 0.001
_MIN_ROUNDS, _MAX_ROUNDS = 5, 50


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured.

    Attributes:
        after_sleep_s: a step of one row after a pause in which the processor slept.
        after_watch_s: likewise, where it was kept busy.
        num_idle_processors: of those that this process may use, apart from what it used itself.
    """

    after_sleep_s: float
    after_watch_s: float
    num_idle_processors: float


def spin_seconds(trial: Trial, num_threads: int) -> float:
    """For how long a server with so many threads watches after a step; 0 where it had better not. Pure."""
    gains = trial.after_sleep_s > trial.after_watch_s * _MIN_GAIN
    if not gains or trial.num_idle_processors < num_threads + _MIN_SPARE:
        return 0.0
    return min(_LONGEST_S, _STEPS_WATCHED * trial.after_watch_s)


def measure_spin(step: Callable[[], object], num_threads: int, budget_s: float) -> float:
    """Tries both kinds of pause, in turns.

    Args:
        step: computes one row.
        num_threads: that it computes with.
        budget_s: how long to measure, about; 0 does not.

    Returns:
        `spin_seconds`; 0 where too few processors may be used, or nothing tells how busy they are.
    """
    usable = available_cores()
    if not budget_s or usable <= num_threads or not hasattr(os, "sched_getaffinity"):
        return 0.0
    step()
    step_s = _seconds(step)
    pause_s = max(step_s, _SHORTEST_PAUSE_S)
    num_rounds = int(budget_s / (2 * (step_s + pause_s)))
    after_sleep, after_watch = [], []
    began_s, busy_s = time.perf_counter(), _busy_seconds_of_others()
    for _ in range(max(_MIN_ROUNDS, min(num_rounds, _MAX_ROUNDS))):
        time.sleep(pause_s)
        after_sleep.append(_seconds(step))
        _watch(pause_s)
        after_watch.append(_seconds(step))
    num_busy = (_busy_seconds_of_others() - busy_s) / (time.perf_counter() - began_s)
    num_idle = min(usable, len(os.sched_getaffinity(0)) - max(0.0, num_busy))
    trial = Trial(statistics.median(after_sleep), statistics.median(after_watch), num_idle)
    return spin_seconds(trial, num_threads)


def _seconds(step: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def _watch(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def _busy_seconds_of_others() -> float:
    """Processor time of all other processes so far, on the processors that this one may run on."""
    mine = os.sched_getaffinity(0)
    times = [each for number, each in enumerate(psutil.cpu_times(percpu=True)) if number in mine]
    busy_s = sum(sum(each[:8]) - each.idle - getattr(each, "iowait", 0.0) for each in times)
    return busy_s - time.process_time()
