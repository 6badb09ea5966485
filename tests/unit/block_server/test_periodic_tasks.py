"""The check of the invariants shares the event loop: it runs slice by slice, and not at all under load."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from prometheus_client import CollectorRegistry

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable
from corolla.block_server.periodic_tasks import PeriodicTasks
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.sessions import SessionTable
from corolla.cache.pages import PagePool
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule
from tests.unit.block_server.test_sessions import a_request


class EmptyRing:
    num_waiting = 0


class SlowEngine:
    """Runs commands at once. Each reading of the clock advances it by a second, so a slice is one part."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_commands = 0
        self.has_more_to_do = False
        self.first_hop = EmptyRing()

    def look(self) -> None:
        pass

    def clock(self) -> float:
        self.now_s += 1
        return self.now_s

    def between_iterations(self, command: Callable[[], None]) -> None:
        self.num_commands += 1
        command()


class Server:
    def __init__(self) -> None:
        self.engine = SlowEngine()
        self.pool = PagePool(4, 4)
        self.sessions: SessionTable[Any] = SessionTable(self.pool, lambda: SessionPages(self.pool, [GroupRule()]))
        self.registry, self.lags = CollectorRegistry(), list[int]()
        self.periodic_tasks = PeriodicTasks(
            cast(Engine, self.engine), Scheduler(1, 1), self.sessions, BoundaryActivations(0), PeerTable(),
            BlockServerMetrics(self.registry), standby_lags=lambda: self.lags,
        )  # fmt: skip

    async def keep_house(self) -> int:
        """How many slices the check took."""
        running = asyncio.create_task(self.periodic_tasks.run())
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        return self.engine.num_commands


async def test_each_slice_of_the_comparison_has_a_turn_of_the_event_loop_of_its_own() -> None:
    server = Server()
    # The sums, the four pages, and the end.
    assert await server.keep_house() == 3
    assert server.periodic_tasks.violations == []


async def test_a_leak_is_found() -> None:
    server = Server()
    server.pool.allocate(1)
    await server.keep_house()
    assert [violation.invariant for violation in server.periodic_tasks.violations] == ["promises", "pages"]


async def test_invariants_are_not_checked_under_load() -> None:
    server = Server()
    server.pool.allocate(1)
    server.engine.has_more_to_do = True
    assert await server.keep_house() == 1
    assert server.periodic_tasks.violations == []
    server.periodic_tasks.check_invariants()
    assert server.periodic_tasks.violations != []


async def test_gauges_tell_how_far_standbys_are_behind() -> None:
    server = Server()
    for name in (b"a", b"b", b"c"):
        server.sessions.open(a_request(name, max_tokens=1), 0.0)
    server.lags = [3, 20]
    await server.keep_house()
    gauge = server.registry.get_sample_value
    assert gauge("corolla_standby_lag_tokens") == 20
    assert [gauge("corolla_hop_running_sessions", {"standby": each}) for each in ("yes", "no")] == [2, 1]
