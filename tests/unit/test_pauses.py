"""A pause of the machine is told from a wait for somebody."""

import asyncio
import subprocess
import sys
import time

from tests.faults.pauses import Pauses
from tests.faults.streams import longest_wait_s

# Stops itself from outside, and says how much of the time was a pause.
PAUSED = """
import os, subprocess, time
from tests.faults.pauses import Pauses
pauses, began_s = Pauses(), time.monotonic()
with pauses.watched():
    time.sleep(0.1)
    subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"], check=True)
    time.sleep(0.1)
print(pauses.num_seconds(began_s))
"""


def test_a_process_that_was_stopped_was_paused() -> None:
    printed = subprocess.run([sys.executable, "-c", PAUSED], check=True, capture_output=True, text=True).stdout
    assert float(printed) > 0.9


async def test_who_waits_without_a_pause_has_waited() -> None:
    pauses, began_s = Pauses(), time.monotonic()
    with pauses.watched():
        await asyncio.sleep(0.5)
        waited_s = time.monotonic() - began_s
        assert pauses.num_seconds(began_s) < waited_s - 0.2
    assert pauses.num_seconds(time.monotonic()) == 0


def test_only_waits_between_the_moments_count() -> None:
    assert longest_wait_s([0, 3, 4, 6, 11], 5, 6) == 5
    assert longest_wait_s([0, 3, 4, 6, 11], 3.5, 3.9) == 1
    assert longest_wait_s([1], 0) == 0
