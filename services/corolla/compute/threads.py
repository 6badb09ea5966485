"""Chooses how many threads a process computes with, by measuring, since more threads are often slower.

A few rows times small matrices keep only one core busy; large matrices keep many busy. Each further thread may also
have to wait for a core that another process uses. So the number is doubled as long as that clearly pays.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import torch

from corolla.chassis.processors import available_cores

# The least speedup for which the number is doubled: less is not worth cores that other processes could use.
_MIN_GAIN: Final = 1.2


def choose_num_threads(seconds_with: Callable[[int], float], num_cores: int) -> int:
    """The number of threads, a power of two, up to which each doubling clearly pays.

    Args:
        seconds_with: returns the duration of the work with a number of threads.
        num_cores: the upper bound of the result.
    """
    chosen, seconds = 1, seconds_with(1)
    while chosen * 2 <= num_cores:
        doubled_s = seconds_with(chosen * 2)
        if doubled_s * _MIN_GAIN > seconds:
            break
        chosen, seconds = chosen * 2, doubled_s
    return chosen


def set_num_threads(asked_for: int, seconds: Callable[[], float]) -> int:
    """Sets torch's number of threads to `asked_for`, or, if that is 0, to the fastest one. Returns the number.

    Args:
        seconds: does the work once and returns how long it took.
    """

    def seconds_with(num_threads: int) -> float:
        torch.set_num_threads(num_threads)
        return seconds()

    chosen = asked_for or choose_num_threads(seconds_with, available_cores())
    torch.set_num_threads(chosen)
    return chosen


def _compute_alone() -> None:
    # When a thread first asks for its number of threads, torch sets it to the number that any thread set last. So this
    # thread asks before it sets its own number.
    torch.get_num_threads()
    torch.set_num_threads(1)


def single_threaded_pool(num_workers: int, name: str) -> Executor:
    """A pool of threads for work of many small operations: each computes without torch's helper threads."""
    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(num_workers, name, initializer=_compute_alone)
    all_begun = threading.Barrier(num_workers + 1)
    for _ in range(num_workers):
        pool.submit(all_begun.wait)
    all_begun.wait()
    # A thread that has not computed yet gets the number that any thread set last, so this restores the earlier one.
    torch.set_num_threads(num_threads)
    return pool
