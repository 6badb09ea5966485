"""Pushes placements to watchers. One loop for each watched model reads its placement for all watchers of the model."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final

from corolla.chassis.errors import CorollaError, QueueFull, ServiceStopping
from corolla.chassis.tasks import TaskGroup
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import still_registered

# After the store has lost its data, all live servers register again within this time.
_LOST_MEMORY_S: Final = 5.0

MOST_UNKNOWN_MODELS: Final = 16
"""The number of unknown models that may be watched at a time. Each one occupies a connection to Redis, and a caller may
name any model."""
_UNKNOWN_RELIST_FACTOR: Final = 10
"""Unknown models are read less often by this factor. The first server of one is a change, which is pushed at once."""


class _Feed:
    """The placements of one model, for which its watchers wait. A slow watcher gets only the newest one."""

    def __init__(self) -> None:
        self.num_watchers = 0
        self.placement: pb.Placement | None = None
        self.adapters: Sequence[pb.RegisteredAdapter] = ()
        self.task: asyncio.Task[None] | None = None
        self.is_closed = False
        self._published = asyncio.Event()

    def publish(self, placement: pb.Placement) -> None:
        self.placement = placement
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def newer_than(self, seen: pb.Placement | None) -> pb.Placement:
        while self.placement is None or self.placement is seen:
            if self.is_closed:
                raise _stopping()
            await self._published.wait()
        return self.placement


@dataclass(eq=False, repr=False)
class PlacementWatches:
    """Pushes placements to watchers.

    Args:
        tasks: A task group for these watches only.
        relist_interval_s: The time within which an expired lease reaches watchers. Other changes reach them at once.
        load_push_interval_s: The time within which changed load reaches watchers if nothing else changes.
    """

    registry: Registry
    tasks: TaskGroup
    _: KW_ONLY
    relist_interval_s: float
    load_push_interval_s: float
    _feeds: dict[str, _Feed] = field(init=False, default_factory=dict)
    # The placement that a model's last watcher saw, until Redis gives a newer one.
    _last: dict[str, pb.Placement] = field(init=False, default_factory=dict)
    _is_closed: bool = field(init=False, default=False)

    async def watch(self, model: str) -> AsyncIterator[pb.Placement]:
        """Yields the placement now and at each change. While Redis is down, it yields at most the one pushed last.

        Raises:
            ServiceStopping: This router stops.
            QueueFull: Too many models without a server are watched.
        """
        if self._is_closed:
            raise _stopping()
        if model not in self._feeds and sum(map(_is_unknown, self._feeds.values())) >= MOST_UNKNOWN_MODELS:
            raise QueueFull("too many models are watched that have no block server")
        feed = self._feeds.setdefault(model, _Feed())
        feed.num_watchers += 1
        if feed.task is None:
            feed.task = self.tasks.start_essential(partial(self._follow, model, feed), "placement_feed")
        seen: pb.Placement | None = None
        try:
            while True:
                seen = await feed.newer_than(seen)
                yield seen
        finally:
            feed.num_watchers -= 1
            if feed.num_watchers == 0:
                self.tasks.cancel(feed.task)
                del self._feeds[model]
                if feed.placement is not None and feed.placement.servers:
                    self._last[model] = feed.placement

    async def close(self) -> None:
        """Ends all watches with ServiceStopping, and refuses new ones."""
        self._is_closed = True
        for feed in self._feeds.values():
            feed.close()
        await self.tasks.close()

    async def _follow(self, model: str, feed: _Feed) -> None:
        clock = asyncio.get_running_loop().time
        pushed_at = 0.0
        older_since = math.inf
        while True:
            try:
                roster = await self._restored(feed, await self.registry.snapshot(model))
                self._last.pop(model, None)
                before = feed.placement
                # A lower version means that the store has lost its data, not that the servers are gone. They register
                # again within a heartbeat; until then the last pushed placement stays.
                is_older = before is not None and roster.version < before.version
                older_since = min(older_since, clock()) if is_older else math.inf
                if clock() - older_since >= _LOST_MEMORY_S or not is_older:
                    placement = roster.placement()
                    is_changed = before is None or placement.version != before.version
                    is_due = clock() - pushed_at >= self.load_push_interval_s
                    if is_changed or (is_due and placement != before):
                        feed.publish(placement)
                        pushed_at = clock()
                has_been_known = roster.is_known or (before is not None and before.num_model_blocks > 0)
                wait_s = self.relist_interval_s * (1 if has_been_known else _UNKNOWN_RELIST_FACTOR)
                await self.registry.wait_for_change(roster, wait_s)
            except CorollaError:
                if feed.placement is None and model in self._last:
                    feed.publish(self._last[model])
                await asyncio.sleep(self.relist_interval_s)

    async def _restored(self, feed: _Feed, roster: Roster) -> Roster:
        """Registers again the adapters that the store has lost with its data, and returns the roster with them."""
        feed.adapters = still_registered(feed.adapters, roster.adapters, roster.removed_adapters)
        lost = feed.adapters[len(roster.adapters) :]
        if not lost or not roster.is_known:
            return roster
        with suppress(CorollaError):  # watchers get the servers nevertheless
            await self.registry.restore_adapters(roster.model, lost)
            return await self.registry.snapshot(roster.model)
        return roster


def _is_unknown(feed: _Feed) -> bool:
    return feed.placement is None or feed.placement.num_model_blocks == 0


def _stopping() -> ServiceStopping:
    return ServiceStopping("the router is stopping; watch another one")
