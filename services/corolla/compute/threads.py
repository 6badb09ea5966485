"""How many threads a process computes with, by a rule: more threads are often slower."""

import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

import torch

# Each thread gets so many weights of a block. Two threads with 1.8 million each ran the demo model's blocks 1.2 times
# as fast as one for a single row, 1.4 times for 8 rows and 1.6 times for 16 (AMD EPYC with AVX-512). To read 0.5
# million takes 70 us, and the threads of a block wait for each other about eight times, a microsecond or two each.
_LEAST_WEIGHTS_OF_THREAD: Final = 1 << 19


def num_threads_for(num_weights: int, num_cores: int) -> int:
    """The number of threads for blocks of so many weights: a power of two, at most the number of cores."""
    return 1 << max(0, min(num_weights // _LEAST_WEIGHTS_OF_THREAD, num_cores).bit_length() - 1)


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
