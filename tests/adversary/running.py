"""Services in an event loop of their own, how long that stands still, and how much memory they take."""

import asyncio
import gc
import logging
import mmap
import statistics
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, TypeVar

import psutil

from corolla.chassis.errors import CorollaError
from corolla.chassis.heap import settle
from corolla.chassis.loop_thread import LoopThread

Result = TypeVar("Result")

LONGEST_STALL_S: Final = 0.1
"""Fifty milliseconds, on a machine that is twice as slow; longer in proportion where the reference takes longer."""
MOST_MIB: Final = 64

_REFERENCE_S: Final = 0.01
"""What the reference takes on a machine on which a stall may be of LONGEST_STALL_S."""
_REFERENCE_PAGES: Final = b"1" * (4 << 20)
_TICK_S: Final = 0.005
_NAME: Final = "services"


def _reasons(cls: type[CorollaError]) -> frozenset[str]:
    return frozenset({cls.reason}).union(*map(_reasons, cls.__subclasses__()))


REASONS: Final = _reasons(CorollaError) - {"INTERNAL"}
"""The reasons that a refusal may have; none of them means a failure that the service did not foresee."""


def slowness() -> float:
    """How many times as long as usual this machine takes for the reference, of the thread's own time; 1 at least.

    A large message fills pages that the process did not have. These take longest where others want memory, too.
    """

    def reference_s() -> float:
        began_s = time.thread_time()
        sum(number * number for number in range(100_000))
        with mmap.mmap(-1, len(_REFERENCE_PAGES)) as pages:
            pages.write(_REFERENCE_PAGES)
        return time.thread_time() - began_s

    return max(1.0, statistics.median(reference_s() for _ in range(5)) / _REFERENCE_S)


class Running:
    """A thread with an event loop, watched. It is never stopped: gRPC delivers events to each loop that ever used it.

    Attributes:
        longest_s: of a processor, in which the loop came to nothing else.
    """

    def __init__(self) -> None:
        self._thread = LoopThread(_NAME)
        self._own = psutil.Process()
        self.longest_s = 0.0
        self._not_stalled_s = 0.0
        self._watching: asyncio.Task[None]
        self.call(self._watch_soon())

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._thread.call(work)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Meanwhile the loop never stands still for long, and the process does not become much larger."""
        # Tests hold far more objects than services do: a look through them would count as a stall, their log as a leak.
        settle()
        gc.callbacks.append(self._on_collection)
        logging.disable(logging.WARNING)
        usual = slowness()
        self.longest_s = 0.0
        num_bytes = self._own.memory_info().rss
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            gc.callbacks.remove(self._on_collection)
            # Memory that is free, but not returned yet, did not leak.
            settle()
        num_more_mib = (self._own.memory_info().rss - num_bytes) / (1 << 20)
        # Other processes of the machine may have come or gone meanwhile.
        assert self.longest_s < LONGEST_STALL_S * max(usual, slowness())
        assert num_more_mib < MOST_MIB

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        """In whichever thread allocates."""
        if threading.current_thread().name == _NAME:
            self._not_stalled_s += time.thread_time() * (1 if phase == "stop" else -1)

    async def _watch_soon(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Measures the thread's own time: while others have the processor, the loop does not count as stalled."""
        last_s = time.thread_time() - self._not_stalled_s
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.thread_time() - self._not_stalled_s
            self.longest_s, last_s = max(self.longest_s, now_s - last_s), now_s


@cache
def running() -> Running:
    """That of this process."""
    return Running()
