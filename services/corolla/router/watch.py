"""Placement for watchers: one loop per watched model, however many watch it, and the newest state for each of them."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from corolla.chassis.errors import CorollaError, QueueFull, ServiceStopping
from corolla.chassis.tasks import TaskGroup
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.v1 import router_pb2 as pb
from corolla.wire.adapter_version import still_registered

# In which the servers of a store that has lost its memory have registered again, or are gone.
_LOST_MEMORY_S: Final = 5.0

MOST_UNKNOWN_MODELS: Final = 16
"""That are watched at a time: each waits at a connection to Redis, and anybody may name models."""
_UNKNOWN_RELIST_FACTOR: Final = 10
"""The first server of a model is a change, which is pushed at once; nothing else can become of an unknown one."""


class _Feed:
    """What the watchers of one model wait on. A slow one finds only the newest placement."""

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


class PlacementWatches:
    """Pushes placements. A change reaches watchers at once, an expired lease within `relist_interval_s`, changed load
    alone within `load_push_interval_s`.

    Args:
        tasks: of these watches alone.
    """

    def __init__(
        self, registry: Registry, tasks: TaskGroup, *, relist_interval_s: float, load_push_interval_s: float
    ) -> None:
        self._registry = registry
        self._relist_interval_s = relist_interval_s
        self._load_push_interval_s = load_push_interval_s
        self._feeds: dict[str, _Feed] = {}
        # What a model's last watcher saw, until Redis says more.
        self._last: dict[str, pb.Placement] = {}
        self._is_closed = False
        self._tasks = tasks

    async def watch(self, model: str) -> AsyncIterator[pb.Placement]:
        """The placement now, and again at each change; while Redis is away, at most the one that was pushed last.

        Raises:
            ServiceStopping: this router.
            QueueFull: too many models are watched that no server has registered for.
        """
        if self._is_closed:
            raise _stopping()
        if model not in self._feeds and sum(map(_is_unknown, self._feeds.values())) >= MOST_UNKNOWN_MODELS:
            raise QueueFull("too many models are watched that have no block server")
        feed = self._feeds.setdefault(model, _Feed())
        feed.num_watchers += 1
        if feed.task is None:
            feed.task = self._tasks.start_essential(partial(self._follow, model, feed), "placement_feed")
        seen: pb.Placement | None = None
        try:
            while True:
                seen = await feed.newer_than(seen)
                yield seen
        finally:
            feed.num_watchers -= 1
            if feed.num_watchers == 0:
                self._tasks.cancel(feed.task)
                del self._feeds[model]
                if feed.placement is not None and feed.placement.servers:
                    self._last[model] = feed.placement

    async def close(self) -> None:
        """Ends all watches with ServiceStopping, and begins none any more."""
        self._is_closed = True
        for feed in self._feeds.values():
            feed.close()
        await self._tasks.close()

    async def _follow(self, model: str, feed: _Feed) -> None:
        clock = asyncio.get_running_loop().time
        pushed_at = 0.0
        older_since = math.inf
        while True:
            try:
                roster = await self._restored(feed, await self._registry.snapshot(model, with_adapters=True))
                self._last.pop(model, None)
                before = feed.placement
                # A lower version is a store that has lost its memory, not a cluster that has lost its servers: they
                # register again within a heartbeat, and until then what was pushed last stands.
                is_older = before is not None and roster.version < before.version
                older_since = min(older_since, clock()) if is_older else math.inf
                if clock() - older_since >= _LOST_MEMORY_S or not is_older:
                    placement = roster.placement()
                    is_changed = before is None or placement.version != before.version
                    is_due = clock() - pushed_at >= self._load_push_interval_s
                    if is_changed or (is_due and placement != before):
                        feed.publish(placement)
                        pushed_at = clock()
                has_been_known = roster.is_known or (before is not None and before.num_model_blocks > 0)
                wait_s = self._relist_interval_s * (1 if has_been_known else _UNKNOWN_RELIST_FACTOR)
                await self._registry.wait_for_change(roster, wait_s)
            except CorollaError:
                if feed.placement is None and model in self._last:
                    feed.publish(self._last[model])
                await asyncio.sleep(self._relist_interval_s)

    async def _restored(self, feed: _Feed, roster: Roster) -> Roster:
        """The roster with the adapters that the store has lost with its memory: they are registered again."""
        feed.adapters = still_registered(feed.adapters, roster.adapters, roster.removed_adapters)
        lost = feed.adapters[len(roster.adapters) :]
        if not lost or not roster.is_known:
            return roster
        with suppress(CorollaError):  # the servers are pushed nevertheless
            await self._registry.restore_adapters(roster.model, lost)
            return await self._registry.snapshot(roster.model, with_adapters=True)
        return roster


def _is_unknown(feed: _Feed) -> bool:
    return feed.placement is None or feed.placement.num_model_blocks == 0


def _stopping() -> ServiceStopping:
    return ServiceStopping("the router stops; watch another one")
