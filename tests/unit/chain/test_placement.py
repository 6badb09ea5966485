"""The servers that a client service plans with."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from itertools import pairwise
from typing import Any, cast
from unittest import mock

import pytest

from corolla.chain import routes as routes_module
from corolla.chain.control import ControlPlane
from corolla.chain.loop_turns import MOST_IN_A_TURN
from corolla.chain.placement import PlacementWatch
from corolla.chain.routes import Routes
from corolla.chassis.errors import AdapterNotFound, NoChain
from corolla.planning.planner import plan_around_suspects
from corolla.router.roster import Roster, place_of
from corolla.v1 import blocks_pb2, common_pb2
from corolla.v1 import router_pb2 as pb
from tests.simulation.loop import VirtualLoop


class Router:
    """Stands for the control plane and its router: it pushes the test's placements.

    Attributes:
        excluded: server ids that were to be left out, for each chain that was asked for.
    """

    model = "tiny"

    def __init__(self) -> None:
        self.stub = self
        self.excluded: list[frozenset[str]] = []
        self.registered: list[pb.RegisteredAdapter] = []
        self.num_looks = 0
        self._pushed: asyncio.Queue[pb.Placement] = asyncio.Queue()

    async def push(self, placement: pb.Placement) -> None:
        """Returns when the watch knows it."""
        self._pushed.put_nowait(placement)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def WatchPlacement(self, request: pb.WatchPlacementRequest) -> AsyncIterator[pb.Placement]:
        while True:
            yield await self._pushed.get()

    async def get_placement(self) -> pb.Placement:
        """Takes a while to answer, with what was registered when it was asked."""
        self.num_looks += 1
        placement = pb.Placement(adapters=self.registered)
        await asyncio.sleep(0.2)
        return placement

    async def plan_chain(self, _fingerprint: str, _num_tokens: int, excluded: frozenset[str]) -> pb.PlanChainResponse:
        self.excluded.append(excluded)
        return pb.PlanChainResponse()


def watched(test: Callable[[Router, PlacementWatch], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test with a watch, in virtual time."""

    async def run() -> None:
        router = Router()
        watch = PlacementWatch(cast(ControlPlane, router))
        watching = asyncio.ensure_future(watch.run())
        await asyncio.sleep(0)
        await test(router, watch)
        watching.cancel()
        await asyncio.wait([watching])

    # Not as `wraps` does it all: a runner of tests would look at the test's own parameters.
    @wraps(test, updated=())
    def run_in_virtual_time() -> None:
        loop = VirtualLoop()
        loop.run_until_complete(run())
        loop.close()

    del run_in_virtual_time.__wrapped__
    return run_in_virtual_time


def placement(*names: str, complete: bool) -> pb.Placement:
    servers = [pb.PlacedServer(server=pb.ServerDescription(server_id=name, address=name[0] + ":1")) for name in names]
    return pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain() if complete else None)


def names(watch: PlacementWatch) -> list[str]:
    return [each.server.server_id for each in watch.servers]


@watched
async def test_servers_that_a_store_forgot_count_for_a_few_seconds(router: Router, watch: PlacementWatch) -> None:
    assert names(watch) == []
    assert not watch.is_settling, "no router has said anything"
    await router.push(placement("a1", "b1", complete=True))
    await router.push(placement(complete=False))
    assert names(watch) == ["a1", "b1"]
    await asyncio.sleep(3)
    # The newer incarnation at an address stands for the older one.
    await router.push(placement("a2", complete=False))
    assert names(watch) == ["a2", "b1"]
    assert watch.is_settling
    await asyncio.sleep(2.1)
    assert names(watch) == ["a2"]
    assert not watch.is_settling
    await router.push(placement("a2", "b2", complete=True))
    assert names(watch) == ["a2", "b2"]


@watched
async def test_blocks_that_were_never_seen_covered_may_be_so_in_a_few_seconds(
    router: Router, watch: PlacementWatch
) -> None:
    await router.push(placement("a1", complete=False))
    assert watch.is_settling
    await asyncio.sleep(3)
    await router.push(placement(complete=False))
    await asyncio.sleep(2.1)
    assert not watch.is_settling


@watched
async def test_a_complete_placement_needs_no_memory(router: Router, watch: PlacementWatch) -> None:
    await router.push(placement("a1", "b1", "c1", complete=True))
    await router.push(placement("a1", "b1", complete=True))
    assert names(watch) == ["a1", "b1"]


def server_of(source: random.Random, number: int) -> pb.PlacedServer:
    """A server whose id may come again with other blocks, at another address."""
    placed = pb.PlacedServer(
        server=pb.ServerDescription(server_id=f"s{number}", address=f"host:{source.choice([number + 1, 100])}"),
        span=common_pb2.BlockSpan(start=source.randrange(2), end=2),
        state=source.choice([pb.SERVER_STATE_JOINING, pb.SERVER_STATE_READY]),
        suspected=source.random() < 0.3, doubted=source.random() < 0.3,
    )  # fmt: skip
    placed.load.heartbeat_number = source.randrange(2)
    if source.random() < 0.5:
        placed.load.max_session_tokens = source.randrange(3)
    return placed


@pytest.mark.parametrize("seed", range(20))
async def test_who_takes_changes_knows_what_a_whole_placement_says(seed: int) -> None:
    source = random.Random(seed)
    whole, changing = (PlacementWatch(cast(ControlPlane, Router())) for _ in range(2))
    adapters = [pb.RegisteredAdapter(version=common_pb2.AdapterVersion(name=name, digest="0" * 64)) for name in "ab"]
    before: Roster | None = None
    for _ in range(20):
        # What has not changed is the same object, as in a router's mirror.
        known = {} if before is None else {each.server.server_id: each for each in before.servers}
        servers = [
            known[f"s{number}"] if f"s{number}" in known and source.random() < 0.5 else server_of(source, number)
            for number in range(6)
            if source.random() < 0.7
        ]
        registered = tuple(adapters[: source.choice([0, 1, 1, 2, 2])])
        now = Roster("m", 1, 2, tuple(sorted(servers, key=place_of)), adapters=registered)
        whole.take(now.placement)
        message = now.placement if before is None else now.changes_since(before)
        changing.take(pb.Placement.FromString(message.SerializeToString()))
        before = now
        assert sorted(changing.servers, key=place_of) == sorted(whole.servers, key=place_of)
        assert changing.is_settling or len(changing.servers) == len(now.servers)
        assert (changing.is_complete, changing.adapters_for("t")) == (whole.is_complete, whole.adapters_for("t"))


@pytest.mark.parametrize("turn", [math.nan, math.inf, -1.0, 2.0**1000])
async def test_a_turn_that_is_none_is_not_taken(turn: float) -> None:
    watch = PlacementWatch(cast(ControlPlane, Router()))
    watch.take(pb.Placement(turn=0.25))
    watch.take(pb.Placement(turn=turn))
    assert watch.turn == 0.25


async def test_a_change_of_a_server_that_is_not_known_is_ignored() -> None:
    watch = PlacementWatch(cast(ControlPlane, Router()))
    unknown = pb.PlacedServer(server=pb.ServerDescription(server_id="s"))
    watch.take(pb.Placement(servers=[unknown], change=pb.PlacementChange(gone_server_ids=["s", "t"])))
    assert watch.servers == []


@watched
async def test_planners_begin_at_their_turns_and_go_round(router: Router, watch: PlacementWatch) -> None:
    servers = [
        pb.PlacedServer(
            server=pb.ServerDescription(server_id=name, address=f"{name}:1", fingerprint="f"),
            span=common_pb2.BlockSpan(start=0, end=5), state=pb.SERVER_STATE_READY,
        )
        for name in "cadb"
    ]  # fmt: skip
    await router.push(pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain(), turn=0.5))
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    chains = [await routes.plan(num_tokens=1) for _ in range(8)]
    assert "".join(chain.hops[0].server_id for chain in chains) == "cdabcdab"


def ready(name: str, start: int, end: int, num_tokens: int) -> pb.PlacedServer:
    return pb.PlacedServer(
        server=pb.ServerDescription(server_id=name, address=f"{name}:1", fingerprint="f"),
        span=common_pb2.BlockSpan(start=start, end=end), state=pb.SERVER_STATE_READY,
        load=pb.ServerLoad(max_session_tokens=num_tokens),
    )  # fmt: skip


@watched
async def test_free_pages_that_hold_the_text_are_not_counted_twice(router: Router, watch: PlacementWatch) -> None:
    asked: dict[str, Any] = {"num_tokens": 150, "held": {"holds": 64}}
    for servers, chosen in (("holds", "other"), "other"), (("holds",), "holds"):
        placed = [ready(name, 0, 5, 100 if name == "holds" else 1000) for name in servers]
        await router.push(pb.Placement(servers=placed, cheapest_chain=common_pb2.Chain()))
        chain = await Routes(cast(ControlPlane, router), watch, "f", 5).plan(**asked)
        assert chain.hops[0].server_id == chosen


@watched
async def test_few_plans_are_tried_where_many_servers_hold_nothing(router: Router, watch: PlacementWatch) -> None:
    servers = [ready("full", 0, 3, 100), *(ready(f"s{number}", 3, 5, 1000) for number in range(30))]
    await router.push(pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain()))
    with mock.patch.object(routes_module, "plan_around_suspects", wraps=plan_around_suspects) as planned:
        routes = Routes(cast(ControlPlane, router), watch, "f", 5)
        chain = await routes.plan(num_tokens=150, held={"full": 128})
    assert chain.hops[0].server_id == "full"
    assert planned.call_count <= 6


@watched
async def test_a_text_is_worth_waiting_for_where_it_makes_the_difference(router: Router, watch: PlacementWatch) -> None:
    server = pb.PlacedServer(
        server=pb.ServerDescription(server_id="a", address="a:1", fingerprint="f"),
        span=common_pb2.BlockSpan(start=0, end=5), state=pb.SERVER_STATE_READY,
        load=pb.ServerLoad(max_session_tokens=30),
    )  # fmt: skip
    await router.push(pb.Placement(servers=[server], cheapest_chain=common_pb2.Chain()))
    routes, held = Routes(cast(ControlPlane, router), watch, "f", 5), {"a": 64}
    assert [routes.needs_text_in_common(num_tokens, held) for num_tokens in (30, 31, 94, 95)] == [
        False,
        True,
        True,
        False,
    ]
    assert not routes.needs_text_in_common(90, {})
    # Others that are about to open do not count, but what the server says does.
    for _ in range(8):
        await routes.plan(num_tokens=90, held=held)
    assert routes.needs_text_in_common(90, held)
    routes.hear_load("a:1", blocks_pb2.HopLoad(max_session_tokens=20))
    assert not routes.needs_text_in_common(90, held)


@watched
async def test_of_sessions_that_wait_for_a_placement_few_are_placed_in_a_turn_of_the_loop(
    router: Router, watch: PlacementWatch
) -> None:
    """The event loop does other things in between: a stall would grow with the number of sessions."""
    servers = [
        pb.PlacedServer(
            server=pb.ServerDescription(server_id=name, address=f"{name}:1", fingerprint="f"),
            span=common_pb2.BlockSpan(start=0, end=5), state=pb.SERVER_STATE_READY,
        )
        for name in "ab"
    ]  # fmt: skip
    await router.push(pb.Placement(servers=servers[:1], cheapest_chain=common_pb2.Chain()))
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    hop = common_pb2.Hop(server_id="a", address="a:1", span=servers[0].span)
    lost = common_pb2.Chain(fingerprint="f", hops=[hop])
    placing = [asyncio.ensure_future(routes.replace_lost(lost, {"a"}, num_tokens=1, patience_s=1.0)) for _ in range(20)]
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in placing)
    await router.push(pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain()))
    num_placed = [0]
    while num_placed[-1] < len(placing):
        await asyncio.sleep(0)
        num_placed.append(sum(each.done() for each in placing))
    assert max(after - before for before, after in pairwise(num_placed)) == MOST_IN_A_TURN
    assert {each.result().hops[0].server_id for each in placing} == {"b"}


@watched
async def test_a_lost_hop_is_replaced_by_a_server_that_holds_the_text(router: Router, watch: PlacementWatch) -> None:
    servers = [ready("a", 0, 3, 1000), *(ready(name, 3, 5, 1000) for name in "bcd")]
    await router.push(pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain()))
    hops = [
        common_pb2.Hop(server_id=each.server.server_id, address=each.server.address, span=each.span)
        for each in servers[:2]
    ]
    chain = common_pb2.Chain(hops=hops, fingerprint="f")
    asked: dict[str, Any] = {"num_tokens": 900, "patience_s": 0.0}
    for holder in "cdcd":
        routes = Routes(cast(ControlPlane, router), watch, "f", 5)
        replaced = await routes.replace_lost(chain, {"b"}, **asked, held={holder: 64, "b": 128})
        assert [hop.server_id for hop in replaced.hops] == ["a", holder]
    # It needs room for the whole text, since what it holds may be among its free pages.
    full = ready("c", 3, 5, 800)
    await router.push(pb.Placement(servers=[*servers[:2], full, servers[3]], cheapest_chain=common_pb2.Chain()))
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    replaced = await routes.replace_lost(chain, {"b"}, **asked, held={"c": 128})
    assert [hop.server_id for hop in replaced.hops] == ["a", "d"]


@watched
async def test_callers_wait_for_servers_that_say_when_they_are_ready(router: Router, watch: PlacementWatch) -> None:
    here, joins = ready("a", 0, 3, 1000), ready("b", 3, 5, 1000)
    joins.state = pb.SERVER_STATE_JOINING
    joins.load.start_seconds_left = 20
    await router.push(pb.Placement(servers=[here, joins]))
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    with pytest.raises(NoChain, match="ready in 20 s") as refused:
        await routes.plan(num_tokens=1, asks_router=False)
    assert refused.value.retry_after_s == 20
    joins.load.start_seconds_left = 1 << 30
    await router.push(pb.Placement(servers=[here, joins]))
    with pytest.raises(NoChain) as refused:
        await routes.plan(num_tokens=1, asks_router=False)
    assert refused.value.retry_after_s == 600
    joins.load.start_seconds_left = 20
    await router.push(pb.Placement(servers=[here, joins]))
    hops = [
        common_pb2.Hop(server_id=name, address=f"{name}:1", span=common_pb2.BlockSpan(start=start, end=end))
        for name, start, end in (("a", 0, 3), ("lost", 3, 5))
    ]
    chain = common_pb2.Chain(hops=hops, fingerprint="f")
    replacing = asyncio.ensure_future(routes.replace_lost(chain, {"lost"}, num_tokens=1, patience_s=5))
    await asyncio.sleep(15)
    assert not replacing.done(), "three times as long as its patience"
    joins.state = pb.SERVER_STATE_READY
    await router.push(pb.Placement(servers=[here, joins], cheapest_chain=common_pb2.Chain()))
    assert [hop.server_id for hop in (await replacing).hops] == ["a", "b"]
    joins.state = pb.SERVER_STATE_JOINING
    await router.push(pb.Placement(servers=[here, joins]))
    with pytest.raises(NoChain):
        await routes.replace_lost(
            chain, {"lost"}, num_tokens=1, patience_s=5, until_s=asyncio.get_running_loop().time() + 7
        )


@watched
async def test_a_departed_server_that_is_not_listed_is_forgotten(router: Router, watch: PlacementWatch) -> None:
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    for number in range(100):
        await router.push(placement(f"a{number}", f"b{number}", complete=True))
        assert names(watch) == [f"a{number}", f"b{number}"]
        routes.exclude_leaving(f"a{number}")
        routes.exclude_leaving(f"b{number}")
    await routes.plan(num_tokens=1)
    assert router.excluded == [{"a99", "b99"}]


@watched
async def test_a_server_has_left_in_order_if_it_drained_before_it_was_gone(
    router: Router, watch: PlacementWatch
) -> None:
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    assert not routes.is_leaving("a1")
    listed = placement("a1", "b1", complete=True)
    await router.push(listed)
    assert not routes.is_leaving("a1")
    listed.servers[0].state = pb.SERVER_STATE_DRAINING
    await router.push(listed)
    assert routes.is_leaving("a1")
    assert not routes.is_leaving("b1")
    await router.push(placement("a2", "b2", complete=True))
    assert routes.is_leaving("a1")
    assert not routes.is_leaving("b1"), "it died: a supervisor took it out of the placement"
    routes.exclude_leaving("b1")
    assert routes.is_leaving("b1")
    await router.push(placement("a1", "b1", complete=True))
    assert not routes.is_leaving("a1"), "its pod was deleted and it lives on"
    listed.servers[1].state = pb.SERVER_STATE_DRAINING
    with mock.patch("corolla.chain.placement.MOST_DRAINED", 1):
        await router.push(listed)
    assert list(watch.drained) == ["b1"]


@watched
async def test_adapters_that_a_store_has_lost_are_known_until_they_are_taken_out(
    router: Router, watch: PlacementWatch
) -> None:
    version = common_pb2.AdapterVersion(name="legal", digest="0" * 64)
    await router.push(pb.Placement(adapters=[pb.RegisteredAdapter(version=version)]))
    await router.push(pb.Placement())
    assert (await watch.adapter("legal", "acme")).digest == version.digest
    await router.push(pb.Placement(removed_adapters=[version]))
    assert watch.adapters_for("acme") == []


@watched
async def test_an_adapter_that_was_just_registered_is_found_whoever_asked_before(
    router: Router, watch: PlacementWatch
) -> None:
    unknown = asyncio.ensure_future(watch.adapter("nothing", "acme"))
    await asyncio.sleep(0.1)
    version = common_pb2.AdapterVersion(name="legal", digest="0" * 64)
    router.registered.append(pb.RegisteredAdapter(version=version))
    found = await asyncio.gather(*(watch.adapter("legal", "acme") for _ in range(20)))
    assert {each.name for each in found} == {"legal"}
    assert router.num_looks == 2
    await asyncio.wait([unknown])
    assert isinstance(unknown.exception(), AdapterNotFound)


@watched
async def test_servers_of_other_weights_are_named_as_the_reason(router: Router, watch: PlacementWatch) -> None:
    routes = Routes(cast(ControlPlane, router), watch, "f", 5)
    other = placement("a1", complete=True)
    other.servers[0].server.fingerprint = "g"
    other.servers[0].server.dtype = "bfloat16"
    await router.push(other)
    with pytest.raises(NoChain, match=r"dtype is bfloat16\).*COROLLA_DTYPE"):
        await routes.plan(num_tokens=1, asks_router=False)
