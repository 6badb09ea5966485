"""Streams the placement as events. One event serves all watchers; the rate of events and the watchers are limited."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Final

from corolla.chassis.errors import QueueFull, ServiceStopping
from corolla.client.api.tenants import KeyHolder
from corolla.http.placement_facts import PlacementFacts

INTERVAL_S: Final = 0.25
"""The least time between two events."""
_SILENCE_S: Final = 15.0
_STILL_THERE: Final = b": \n\n"
_RETRY_S: Final = 5.0


class PlacementStream:
    """The stream of placements for all watchers.

    Args:
        describe: returns the current placement.
        max_watchers: the most watchers at a time.
        max_of_tenant: returns the most watchers of one tenant; called for each new watcher.
    """

    def __init__(
        self, describe: Callable[[], PlacementFacts], *, max_watchers: int, max_of_tenant: Callable[[], int]
    ) -> None:
        self._describe = describe
        self._max_watchers = max_watchers
        self._max_of_tenant = max_of_tenant
        self._watchers: Counter[str] = Counter()
        self._closed = asyncio.Event()
        self._event = b""
        self._described_s = -INTERVAL_S

    @property
    def num_watchers(self) -> int:
        return self._watchers.total()

    def close(self) -> None:
        """Ends all streams without an error, and starts no new ones."""
        self._closed.set()

    async def watch(self, caller: KeyHolder) -> AsyncGenerator[bytes, None]:
        """Yields an event with the current placement, one after each change, and after a long silence a comment.

        Raises:
            QueueFull: there are too many watchers.
            ServiceStopping: the service is stopping.
            Unauthenticated: the caller's key is no longer valid.
        """
        if self.num_watchers >= self._max_watchers or self._watchers[caller.tenant] >= self._max_of_tenant():
            raise QueueFull("too many callers watch the placement; try again", retry_after_s=_RETRY_S)
        if self._closed.is_set():
            raise ServiceStopping("the service is stopping; watch another one")
        self._watchers[caller.tenant] += 1
        clock = asyncio.get_running_loop().time
        seen, sent_s = b"", 0.0
        try:
            while not self._closed.is_set():
                caller.check_again()
                event = self._now(clock())
                if event != seen:
                    seen, sent_s = event, clock()
                    yield event
                elif clock() - sent_s >= _SILENCE_S:
                    sent_s = clock()
                    yield _STILL_THERE
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._closed.wait()
        finally:
            self._watchers[caller.tenant] -= 1
            self._watchers += Counter()  # removes tenants without watchers

    def _now(self, now_s: float) -> bytes:
        """The current event, which is made at most once in INTERVAL_S for all watchers."""
        if now_s - self._described_s >= INTERVAL_S:
            self._event = b"data: " + self._describe().model_dump_json().encode() + b"\n\n"
            self._described_s = now_s
        return self._event
