"""The registry against a model of the world, on a real Redis whose clock the test sets.

The scripts run as they are, save that their time is a key. A router that follows the placement, and asks only for what
changed, knows at each moment what a router knows that comes anew.
"""

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from corolla.chassis.errors import LeaseLost, LeaseTaken
from corolla.router import store
from corolla.router.metrics import RouterMetrics
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span
from tests.integration.router.conftest import CLOCK
from tests.tiers import quick

LEASE_MS = 1000
NUM_BLOCKS = 12
DAY_MS = 86_400_000
ADDRESSES = st.sampled_from(["a:1", "a:2", "b:1"])
STATES = st.sampled_from([pb.SERVER_STATE_JOINING, pb.SERVER_STATE_READY, pb.SERVER_STATE_DRAINING])


@dataclass
class Incarnation:
    """The true state of a block server, whatever the store has recorded.

    Attributes:
        is_alive: whether it will ever send another heartbeat of its own accord.
        is_known: whether the store has accepted it and lost nothing since.
        heard_ms: when that was last so, in the time of the world, which no clock can change.
    """

    address: str
    span: Span
    state: "pb.ServerState.ValueType" = pb.SERVER_STATE_JOINING
    server_id: str = field(default_factory=lambda: secrets.token_hex(16))
    is_alive: bool = True
    is_known: bool = False
    heard_ms: int = 0


class World(RuleBasedStateMachine):
    """Servers at three addresses, a store that forgets, and a clock that is set."""

    redis_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.model = f"machine-{secrets.token_hex(6)}"
        self.runner = asyncio.Runner()
        self.redis = Redis.from_url(self.redis_url)
        self.store = store.Store(self.redis_url, 5.0, RouterMetrics(CollectorRegistry()))
        self.registry = Registry(self.store, LEASE_MS)
        self.now_ms = 0
        self.clock_ms = 1_700_000_000_000
        self.newest: dict[str, Incarnation] = {}
        self.older: list[Incarnation] = []
        self.saved: dict[bytes, bytes] | None = None
        self.version = self.num_beats = 0
        self.run(self.set_clock())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def set_clock(self) -> None:
        await self.redis.set(CLOCK + self.model, str(self.clock_ms))

    def teardown(self) -> None:
        self.check_that_all_is_well_after_two_quiet_leases()
        self.run(self.delete_all())
        self.run(self.registry.forget(self.model))
        self.run(self.store.close())
        self.run(self.redis.aclose())
        self.runner.close()

    # --- what servers do ---

    @rule(address=ADDRESSES, start=st.integers(0, NUM_BLOCKS - 1), length=st.integers(1, 4), twice=st.booleans())
    def register(self, address: str, start: int, length: int, twice: bool) -> None:
        """A process starts at the address; the one before, if there was one, is frozen or gone."""
        server = Incarnation(address, Span(start, min(start + length, NUM_BLOCKS)))
        for _ in range(1 + twice):  # the first answer was lost
            given = self.run(self.registry.register(self.described(server), server.span))
            assert given == server.span
        if (before := self.newest.get(address)) is not None:
            before.is_alive = before.is_known = False
            self.older.append(before)
        self.newest[address] = server
        self.heard(server)

    @rule(address=ADDRESSES, state=STATES, in_full=st.booleans(), twice=st.booleans())
    def beat(self, address: str, state: "pb.ServerState.ValueType", in_full: bool, twice: bool) -> None:
        server = self.newest.get(address)
        if server is None or not server.is_alive:
            return
        for _ in range(1 + twice):
            if not self.try_to_beat(server, state, in_full=in_full):
                return

    @precondition(lambda self: self.older)
    @rule(data=st.data(), in_full=st.booleans())
    def an_older_one_wakes_up(self, data: st.DataObject, in_full: bool) -> None:
        """While the store remembers its successor, nothing that it says counts."""
        server = data.draw(st.sampled_from(self.older))
        if not self.newest[server.address].is_known or not self.is_fresh(self.newest[server.address]):
            return
        # Nor does its late farewell take anything from the successor: `who_was_heard_lately_is_placed_as_it_is`.
        self.run(self.registry.deregister(self.model, server.server_id))
        with pytest.raises((LeaseTaken, LeaseLost)):
            self.run(self.registry.heartbeat(self.heartbeat(server, in_full=in_full)))

    @rule(address=ADDRESSES)
    def die(self, address: str) -> None:
        if (server := self.newest.get(address)) is not None:
            server.is_alive = False

    @rule(address=ADDRESSES, twice=st.booleans())
    def leave(self, address: str, twice: bool) -> None:
        if (server := self.newest.get(address)) is not None:
            for _ in range(1 + twice):
                self.run(self.registry.deregister(self.model, server.server_id))
            server.is_alive = server.is_known = False

    # --- what others say of servers ---

    @rule(address=ADDRESSES, mark=st.sampled_from(["one", "other", "slow", "unready", ""]))
    def mark(self, address: str, mark: str) -> None:
        server_id = self.newest[address].server_id if address in self.newest else "nobody"
        match mark:
            case "one" | "other":
                self.run(self.registry.report(self.model, server_id, mark))
            case "slow":
                self.run(self.registry.doubt(self.model, server_id))
            case reason:
                self.run(self.registry.withhold(self.model, server_id, reason, DAY_MS))

    # --- what becomes of time and of the store ---

    @rule(ms=st.integers(1, LEASE_MS // 2))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.clock_ms += ms
        self.run(self.set_clock())

    @rule(ms=st.sampled_from([-DAY_MS, -LEASE_MS, -1, 1, LEASE_MS, DAY_MS]))
    def the_clock_is_set(self, ms: int) -> None:
        self.clock_ms += ms
        self.run(self.set_clock())

    @rule()
    def the_store_forgets(self) -> None:
        self.run(self.delete_all())
        self.forgotten()

    @rule()
    def the_store_is_copied(self) -> None:
        self.saved = self.run(self.dump())

    @precondition(lambda self: self.saved is not None)
    @rule()
    def the_store_loses_what_it_wrote_since(self) -> None:
        self.run(self.restore())
        self.forgotten()

    # --- what must hold ---

    @invariant()
    def who_was_heard_lately_is_placed_as_it_is(self) -> None:
        roster = self.snapshot()
        placed = {each.server.server_id: each for each in roster.servers}
        for server in self.newest.values():
            if server.is_known and self.is_fresh(server):
                found = placed[server.server_id]
                assert (found.span.start, found.span.end, found.state) == (
                    server.span.start, server.span.end, server.state,
                )  # fmt: skip

    @invariant()
    def each_address_is_placed_once(self) -> None:
        addresses = [each.server.address for each in self.snapshot().servers]
        assert len(addresses) == len(set(addresses))

    @invariant()
    def who_follows_knows_as_much_as_who_comes(self) -> None:
        assert self.snapshot() == self.run(Registry(self.store, LEASE_MS).snapshot(self.model))

    @invariant()
    def the_version_changes_with_the_placement_and_only_then(self) -> None:
        before, after = self.snapshot(), self.snapshot()
        assert before == after, "looking changes nothing"

    def check_that_all_is_well_after_two_quiet_leases(self) -> None:
        """The placement lists exactly the servers that are alive."""
        for _ in range(10):
            self.time_passes(LEASE_MS // 4)
            self.snapshot()
            for server in self.newest.values():
                if server.is_alive:
                    self.try_to_beat(server, server.state, in_full=True)
        placed = {each.server.server_id for each in self.snapshot().servers}
        assert placed == {server.server_id for server in self.newest.values() if server.is_alive}
        assert all(server.is_known for server in self.newest.values() if server.is_alive)

    # --- how ---

    def try_to_beat(self, server: Incarnation, state: "pb.ServerState.ValueType", *, in_full: bool) -> bool:
        """Whether the router accepted the heartbeat, as it must from a known server."""
        must_be_heard = server.is_known and self.is_fresh(server)
        server.state = state
        before = self.snapshot()
        was = next((each for each in before.servers if each.server.server_id == server.server_id), None)
        try:
            self.run(self.registry.heartbeat(self.heartbeat(server, in_full=in_full)))
        except LeaseLost:
            assert not must_be_heard
            return False
        self.heard(server)
        after = self.snapshot()
        if was is None or was.state != state:
            assert after.version > before.version
        elif not was.suspected:
            assert after.version == before.version, "nothing new"
        return True

    def heard(self, server: Incarnation) -> None:
        server.is_known, server.heard_ms = True, self.now_ms

    def is_fresh(self, server: Incarnation) -> bool:
        return self.now_ms - server.heard_ms <= LEASE_MS

    def forgotten(self) -> None:
        for server in self.newest.values():
            server.is_known = False

    def snapshot(self) -> Roster:
        roster: Roster = self.run(self.registry.snapshot(self.model))
        return roster

    def described(self, server: Incarnation) -> pb.ServerDescription:
        return pb.ServerDescription(
            server_id=server.server_id, address=server.address, model=self.model, fingerprint="f",
            num_model_blocks=NUM_BLOCKS, capacity_blocks=NUM_BLOCKS,
        )  # fmt: skip

    def heartbeat(self, server: Incarnation, *, in_full: bool) -> pb.HeartbeatRequest:
        self.num_beats += 1
        load = pb.ServerLoad(heartbeat_number=self.num_beats)
        beat = pb.HeartbeatRequest(model=self.model, server_id=server.server_id, state=server.state, load=load)
        if in_full:
            beat.server.CopyFrom(self.described(server))
            beat.span.CopyFrom(common_pb2.BlockSpan(start=server.span.start, end=server.span.end))
        return beat

    async def keys(self) -> list[bytes]:
        return [key async for key in self.redis.scan_iter(store.key_prefix(self.model).replace("[", "\\[") + "*")]

    async def delete_all(self) -> None:
        if keys := await self.keys():
            await self.redis.delete(*keys)

    async def dump(self) -> dict[bytes, bytes]:
        return {key: content for key in await self.keys() if (content := await self.redis.dump(key)) is not None}

    async def restore(self) -> None:
        await self.delete_all()
        for key, content in (self.saved or {}).items():
            await self.redis.restore(key, 0, content)


@pytest.fixture
def world(scripts_on_a_set_clock: None, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> type[World]:
    monkeypatch.setattr(World, "redis_url", redis_url)
    return World


@pytest.mark.parametrize("num_examples", quick([15, 100], 15))
def test_the_registry_agrees_with_the_world(world: type[World], num_examples: int) -> None:
    examples = settings(
        max_examples=num_examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(world, settings=examples)


@pytest.mark.parametrize("ms", [-DAY_MS, -LEASE_MS, LEASE_MS, DAY_MS])
def test_setting_the_clock_neither_ends_nor_prolongs_a_lease(world: type[World], ms: int) -> None:
    here = world()
    here.register("a:1", 0, 3, twice=False)
    here.register("b:1", 3, 3, twice=False)
    for _ in range(8):  # long enough for leases to end
        here.time_passes(LEASE_MS // 4)
        for address in ("a:1", "b:1"):
            here.beat(address, pb.SERVER_STATE_READY, in_full=False, twice=False)
    here.die("a:1")
    here.the_clock_is_set(ms)
    here.who_was_heard_lately_is_placed_as_it_is()
    here.teardown()
