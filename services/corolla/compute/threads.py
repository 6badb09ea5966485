"""How many threads a process computes with: measured, since more are often slower.

Few rows of small matrices keep one core busy; a large model's keep many. Next to other busy processes every thread more
is one more to wait for. So the number is doubled as long as that clearly pays.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import torch

from corolla.chassis.processors import available_cores

# What a doubling must gain: less is not worth a core that others could use.
_MIN_GAIN: Final = 1.2


def choose_num_threads(seconds_with: Callable[[int], float], num_cores: int) -> int:
    """The number of threads, a power of two, up to which each doubling clearly pays.

    Args:
        seconds_with: duration of the work with so many threads.
        num_cores: no more threads than that.
    """
    chosen, seconds = 1, seconds_with(1)
    while chosen * 2 <= num_cores:
        doubled_s = seconds_with(chosen * 2)
        if doubled_s * _MIN_GAIN > seconds:
            break
        chosen, seconds = chosen * 2, doubled_s
    return chosen


def set_num_threads(asked_for: int, seconds: Callable[[], float]) -> int:
    """Sets torch's threads to what was asked for, or, if that is 0, to what is fastest. Returns the number.

    Args:
        seconds: does the work once and says how long it took.
    """

    def seconds_with(num_threads: int) -> float:
        torch.set_num_threads(num_threads)
        return seconds()

    chosen = asked_for or choose_num_threads(seconds_with, available_cores())
    torch.set_num_threads(chosen)
    return chosen


def _compute_alone() -> None:
    # A thread's number is settled when it is first asked for; set before that, it would not be its own.
    torch.get_num_threads()
    torch.set_num_threads(1)


def single_threaded_pool(num_workers: int, name: str) -> Executor:
    """Threads for work that is made of many small operations: each computes with one thread of torch's."""
    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(num_workers, name, initializer=_compute_alone)
    all_begun = threading.Barrier(num_workers + 1)
    for _ in range(num_workers):
        pool.submit(all_begun.wait)
    all_begun.wait()
    # What was set last, in whichever thread, is what torch gives to threads that have not computed yet.
    torch.set_num_threads(num_threads)
    return pool
