"""Spreads work that many sessions begin at one moment over the turns of the event loop."""

import asyncio
from collections import deque
from typing import Final

MOST_IN_A_TURN: Final = 4


class LoopTurns:
    """Lets a few callers go on in each turn of the event loop, in the order in which they came.

    Between two turns the loop reads from its connections and runs what else is ready, so answers that are under way
    wait for a few callers at most, however many there are. A caller that comes while few do goes on at once.

    Args:
        most: how many callers go on in one turn.
    """

    def __init__(self, most: int = MOST_IN_A_TURN) -> None:
        self._most = most
        self._num_passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Returns once the caller may go on."""
        loop = asyncio.get_running_loop()
        if self._num_passed < self._most and not self._waiting:
            if not self._num_passed:
                loop.call_soon(self._begin, loop)
            self._num_passed += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins a turn with those that have waited longest. Runs once in each turn after one in which some went on."""
        self._num_passed = 0
        while self._waiting and self._num_passed < self._most:
            place = self._waiting.popleft()
            if not place.done():  # the caller was cancelled
                place.set_result(None)
                self._num_passed += 1
        if self._num_passed:
            loop.call_soon(self._begin, loop)
