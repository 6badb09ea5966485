"""Pushes placements to watchers. One loop for each watched model reads its placement for all watchers of the model."""

import asyncio
import math
import random
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
_PAUSE_S_OF_A_SERVER: Final = 0.0001
_GOLDEN_RATIO: Final = (math.sqrt(5) - 1) / 2
_UNKNOWN_RELIST_FACTOR: Final = 10
"""Unknown models are read less often by this factor. The first server of one is a change, which is pushed at once."""


class _Feed:
    """The placements of one model, for which its watchers wait. A slow watcher gets only the newest one."""

    def __init__(self) -> None:
        self.num_watchers = 0
        self.roster: Roster | None = None
        self.adapters: Sequence[pb.RegisteredAdapter] = ()
        self.task: asyncio.Task[None] | None = None
        self.is_closed = False
        self._published = asyncio.Event()
        self._changes: tuple[Roster, Roster, pb.Placement] | None = None

    def publish(self, roster: Roster) -> None:
        self.roster = roster
        self._wake()

    def changes(self, before: Roster, now: Roster) -> pb.Placement:
        """Returns what changed between two rosters. Most watchers know the same one."""
        if self._changes is None or self._changes[0] is not before or self._changes[1] is not now:
            self._changes = before, now, now.changes_since(before)
        return self._changes[2]

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def newer_than(self, seen: Roster | None) -> Roster:
        while self.roster is None or self.roster is seen:
            if self.is_closed:
                raise _stopping()
            await self._published.wait()
        return self.roster


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
    _last: dict[str, Roster] = field(init=False, default_factory=dict)
    _turn: float = field(init=False, default_factory=random.random)
    _is_closed: bool = field(init=False, default=False)

    async def watch(self, model: str, *, takes_changes: bool = False) -> AsyncIterator[pb.Placement]:
        """Yields the placement now and at each change. While Redis is down, it yields at most the one pushed last.

        Args:
            takes_changes: Whether messages after the first one list only what changed.

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
        seen: Roster | None = None
        try:
            while True:
                before, seen = seen, await feed.newer_than(seen)
                if not takes_changes:
                    yield seen.placement
                elif before is None:
                    yield seen.first_push(self._next_turn())
                else:
                    yield feed.changes(before, seen)
        finally:
            feed.num_watchers -= 1
            if feed.num_watchers == 0:
                self.tasks.cancel(feed.task)
                del self._feeds[model]
                if feed.roster is not None and feed.roster.servers:
                    self._last[model] = feed.roster

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
                before = feed.roster
                # A lower version means that the store has lost its data, not that the servers are gone. They register
                # again within a heartbeat; until then the last pushed placement stays.
                is_older = before is not None and roster.version < before.version
                older_since = min(older_since, clock()) if is_older else math.inf
                if clock() - older_since >= _LOST_MEMORY_S or not is_older:
                    is_changed = before is None or roster.version != before.version
                    is_due = clock() - pushed_at >= self.load_push_interval_s
                    if is_changed or (is_due and roster != before):
                        feed.publish(roster)
                        pushed_at = clock()
                        # What a push costs grows with the fleet; so pushes are rarer, and changes share them.
                        await asyncio.sleep(_PAUSE_S_OF_A_SERVER * len(roster.servers))
                has_been_known = roster.is_known or (before is not None and before.is_known)
                wait_s = self.relist_interval_s * (1 if has_been_known else _UNKNOWN_RELIST_FACTOR)
                await self.registry.wait_for_change(roster, wait_s)
            except CorollaError:
                if feed.roster is None and model in self._last:
                    feed.publish(self._last[model])
                await asyncio.sleep(self.relist_interval_s)

    def _next_turn(self) -> float:
        """Returns the next of the numbers from 0 to 1 of which any successive ones are spread evenly."""
        self._turn = (self._turn + _GOLDEN_RATIO) % 1
        return self._turn

    async def _restored(self, feed: _Feed, roster: Roster) -> Roster:
        """Registers again the adapters that the store has lost with its data, and returns the roster with them."""
        feed.adapters = still_registered(feed.adapters, roster.adapters, roster.removed_adapters)
        lost = feed.adapters[len(roster.adapters) :]
        if not lost or not roster.is_known:
            return roster
        with suppress(CorollaError):  # watchers get the servers nevertheless
            for each in lost:
                await self.registry.add_adapter(roster.model, each, is_lost=True)
            return await self.registry.snapshot(roster.model)
        return roster


def _is_unknown(feed: _Feed) -> bool:
    return feed.roster is None or not feed.roster.is_known


def _stopping() -> ServiceStopping:
    return ServiceStopping("the router is stopping; watch another one")
