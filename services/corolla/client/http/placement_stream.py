"""The placement as a stream of events: made once for all who watch, at a bounded rate, and for a bounded number."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Final

from corolla.chassis.errors import QueueFull, ServiceStopping
from corolla.client.api.tenants import KeyHolder
from corolla.client.http.placement_facts import PlacementFacts

INTERVAL_S: Final = 0.25
"""Between two events at least."""
_SILENCE_S: Final = 15.0
_STILL_THERE: Final = b": \n\n"
_RETRY_S: Final = 5.0


class PlacementStream:
    """What everybody who watches is sent.

    Args:
        describe: the placement now.
        max_watchers: at a time.
        max_of_tenant: of them, of one tenant; asked whenever somebody comes.
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
        """Ends all streams, which is no failure of them, and begins none any more."""
        self._closed.set()

    async def watch(self, caller: KeyHolder) -> AsyncGenerator[bytes, None]:
        """Events: the placement now, and again after changes; a comment where nothing changes for long.

        Raises:
            QueueFull: too many watch.
            ServiceStopping: the service stops already.
            Unauthenticated: the caller's key is good no more.
        """
        if self.num_watchers >= self._max_watchers or self._watchers[caller.tenant] >= self._max_of_tenant():
            raise QueueFull("as many watch the placement as may; try again", retry_after_s=_RETRY_S)
        if self._closed.is_set():
            raise ServiceStopping("the service stops; watch another one")
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
                await self._wait()
        finally:
            self._watchers[caller.tenant] -= 1
            self._watchers += Counter()  # keeps no tenant that does not watch

    def _now(self, now_s: float) -> bytes:
        """The same for all who ask within the interval."""
        if now_s - self._described_s >= INTERVAL_S:
            self._event = b"data: " + self._describe().model_dump_json().encode() + b"\n\n"
            self._described_s = now_s
        return self._event

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(INTERVAL_S):
                await self._closed.wait()
        except TimeoutError:
            pass
