"""One thread computes, with helpers; all others compute without."""

import asyncio
import os
import subprocess
import sys
import threading

import torch

from corolla.chassis.processors import OPENMP_WAITING
from corolla.compute.compute_thread import ComputeThread, let_others_compute_alone

# Helpers are threads of the process that Python knows nothing of.
_COUNT_HELPERS = """
import asyncio, os, torch
from corolla.compute.compute_thread import ComputeThread, let_others_compute_alone

def product():
    a = torch.ones(512, 512)
    return (a @ a).sum().item()

async def main():
    let_others_compute_alone()
    thread = ComputeThread()
    before = len(os.listdir("/proc/self/task"))
    torch.set_num_threads(2)
    await thread.run(torch.set_num_threads, 2)
    await thread.run(product)
    of_compute_thread = len(os.listdir("/proc/self/task")) - before - 1
    for _ in range(20):
        await asyncio.to_thread(product)
    print(of_compute_thread, len(os.listdir("/proc/self/task")) - before - 1 - of_compute_thread)
    thread.close()

asyncio.run(main())
"""


def test_only_the_compute_thread_has_helpers() -> None:
    environment = {**os.environ, **OPENMP_WAITING, "OMP_NUM_THREADS": "2"}
    printed = subprocess.run(
        [sys.executable, "-c", _COUNT_HELPERS], env=environment, stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    assert printed.split() == ["1", "0"]


async def test_work_is_done_in_one_thread_in_the_order_of_the_calls() -> None:
    thread, done = ComputeThread(), list[int]()
    names = await asyncio.gather(*(thread.run(_noted, done, number) for number in range(20)))
    thread.close()
    assert done == list(range(20))
    assert len(set(names)) == 1


async def test_other_threads_compute_alone() -> None:
    let_others_compute_alone()
    assert set(await asyncio.gather(*(asyncio.to_thread(torch.get_num_threads) for _ in range(20)))) == {1}


def _noted(done: list[int], number: int) -> str:
    done.append(number)
    return threading.current_thread().name
