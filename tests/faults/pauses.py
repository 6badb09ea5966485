"""When this machine let nothing run: what processes kept others waiting for then says nothing about them."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TICK_S: Final = 0.02
# Threads of a busy machine wait a little for their turn; that is the load under which a limit holds.
_SHORTEST_S: Final = 0.2


class Pauses:
    """Notes when a thread that wants to run every 20 milliseconds could not.

    Such a pause is the machine's, or this process's own: a service that hangs stops no other process.
    """

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._ran_s = math.inf

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes them meanwhile."""
        is_over, self._ran_s = threading.Event(), time.monotonic()
        watching = threading.Thread(target=self._watch, args=(is_over,))
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()
            self._ran_s = math.inf

    def num_seconds(self, since_s: float, until_s: float = math.inf) -> float:
        """How much of the time between two readings of `time.monotonic()` were pauses."""
        # The thread may not have run yet since the last one.
        pauses = [*self._pauses, (self._ran_s, time.monotonic())]
        return sum(
            max(0.0, min(ended, until_s) - max(began, since_s))
            for began, ended in pauses
            if ended - began > _SHORTEST_S
        )

    async def sleep(self, seconds: float) -> None:
        """Sleeps for so long without the pauses."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + seconds + self.num_seconds(began_s):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S)

    def _watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(_TICK_S):
            began_s, self._ran_s = self._ran_s, time.monotonic()
            if self._ran_s - began_s > _SHORTEST_S:
                self._pauses.append((began_s, self._ran_s))


PAUSES: Final = Pauses()
"""The pauses of the process in which a row runs."""
