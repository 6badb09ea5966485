"""Moves of block servers: one at a time, only of those that may, and none that the others did not agree to."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from tests.integration.metrics import sample
from tests.integration.router.conftest import FAST_INTERVALS, BlockServer, Clock, Router, StartRouter, spans
from tests.integration.router.test_registration import placement, plan
from tests.integration.waiting import until

FACTS: dict[str, Any] = {"num_model_blocks": 6, "capacity_blocks": 3, "movable": True}


class MovingServer(BlockServer):
    """Follows move orders: drains, leaves, and returns at its address as another incarnation."""

    def __init__(self, router: Router, model: str, **facts: Any) -> None:
        super().__init__(router, model, **{**FACTS, **facts})
        self.moves: list[str] = []

    @property
    def held(self) -> str:
        return f"{self.span.start}:{self.span.end}"

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        async def live() -> None:
            while True:
                answer = await self.beat_in_full()
                if answer.HasField("move_to"):
                    await self._move(answer.move_to)
                await asyncio.sleep(0.05)

        task = asyncio.create_task(live())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _move(self, span: common_pb2.BlockSpan) -> None:
        self.state = pb.SERVER_STATE_DRAINING
        await self.beat_in_full()
        await asyncio.sleep(0.1)
        await self.leave()
        await asyncio.sleep(0.3)  # longer than it takes to decide on the next move
        self.description.server_id = secrets.token_hex(16)
        await self.register(f"{span.start}:{span.end}")
        self.moves.append(self.held)
        self.state = pb.SERVER_STATE_JOINING
        await self.beat_in_full()
        await asyncio.sleep(0.3)
        self.state = pb.SERVER_STATE_READY


async def num_ordered(*routers: Router, model: str, reason: str) -> float:
    name = "corolla_moves_ordered_total"
    return sum([await sample(each.process.metrics_port, name, model=model, reason=reason) for each in routers])


async def test_a_server_that_is_not_needed_moves_to_the_blocks_of_a_lost_one(
    start_router: StartRouter, model: str
) -> None:
    routers = [await start_router(lease_ms=2000) for _ in range(2)]
    servers = [MovingServer(routers[index % 2], model) for index in range(3)]
    assert [await each.join() for each in servers] == ["0:3", "3:6", "0:3"]
    first, lost, third = servers
    async with first.living(), third.living():
        async with lost.living():
            await asyncio.sleep(0.5)
            assert not first.moves + third.moves, "nothing was wrong"

        async def is_whole() -> bool:
            seen = await placement(routers[0], model)
            return len(seen.servers) == 2 and not seen.uncovered

        await until(is_whole)
        assert sorted([first.held, third.held]) == ["0:3", "3:6"]
        assert spans((await plan(routers[1], model)).chain) == ["0:3", "3:6"]
        await asyncio.sleep(1.0)
        assert first.moves + third.moves == ["3:6"], "one move, and that was all"
        assert await num_ordered(*routers, model=model, reason="covers") == 1


async def halves_and_a_spare(router: Router, model: str) -> tuple[MovingServer, MovingServer, MovingServer]:
    """Joins the servers of both halves, and another one of the first half that keeps the second one's weights."""
    servers = first, second, spare = (
        MovingServer(router, model),
        MovingServer(router, model),
        MovingServer(router, model),
    )
    assert [await each.join() for each in servers] == ["0:3", "3:6", "0:3"]
    spare.load.spare_spans.add(start=3, end=6)
    return first, second, spare


async def listen_for_a_lease(clock: Clock, *servers: BlockServer) -> None:
    """Lets a lease pass in which these servers are heard."""
    for _ in range(3):
        await clock.move(25_000)
        for each in servers:
            await each.beat()


async def test_a_server_that_keeps_a_lost_span_takes_it_over_without_settling(
    start_router: StartRouter, model: str, clock: Clock, redis_url: str
) -> None:
    # The router looks for better layouts once a minute, and no lease ends within the test.
    router = await start_router(lease_ms=60_000, intervals=replace(FAST_INTERVALS, settle_s=60.0))
    servers = first, lost, spare = await halves_and_a_spare(router, model)
    await spare.beat_in_full()
    await listen_for_a_lease(clock, *servers)
    await asyncio.sleep(0.3)
    assert not (await spare.beat_in_full()).HasField("move_to"), "nothing is lost"
    async with Redis.from_url(redis_url) as redis:
        await redis.delete(*[key async for key in redis.scan_iter(f"*{{{model}}}*")])
    for each in (first, spare):
        await each.beat_in_full()
    await until(lambda: are_listed(router, model, 2))
    await asyncio.sleep(0.3)
    assert not (await spare.beat_in_full()).HasField("move_to"), "Redis lost its data, and the third will be heard"
    await lost.beat_in_full()
    await listen_for_a_lease(clock, *servers)
    await lost.leave()

    async def ordered() -> pb.HeartbeatResponse | None:
        answers = [await first.beat_in_full(), await spare.beat_in_full()]
        assert not answers[0].HasField("move_to")
        return answers[1] if answers[1].HasField("move_to") else None

    async def is_ordered() -> bool:
        return await ordered() is not None

    await until(is_ordered)
    answer = await ordered()
    assert answer is not None
    assert answer.at_once
    assert (answer.move_to.start, answer.move_to.end) == (3, 6)
    assert await num_ordered(router, model=model, reason="covers") == 1


async def test_only_models_with_spares_are_read_often(
    start_router: StartRouter, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start_router()
    spare, other = MovingServer(first, model), MovingServer(first, f"other-{model}")
    spare.load.spare_spans.add(start=3, end=6)
    for each in (spare, other):
        await each.join()
        await each.beat_in_full()
    read = Counter[str]()
    snapshot = Registry.snapshot

    async def counted(registry: Registry, name: str) -> Roster:
        read[name] += 1
        return await snapshot(registry, name)

    await first.process.stop()
    monkeypatch.setattr(Registry, "snapshot", counted)
    await start_router(intervals=replace(FAST_INTERVALS, relist_s=60.0, settle_s=60.0, takeover_s=0.01))
    await until(lambda: read[model] >= 20)
    assert read[other.description.model] < 10


async def are_listed(router: Router, model: str, number: int) -> bool:
    return len((await placement(router, model)).servers) == number


async def test_the_blocks_of_a_server_that_drains_are_taken_over_while_it_serves(
    start_router: StartRouter, model: str, clock: Clock
) -> None:
    router = await start_router(lease_ms=60_000, intervals=replace(FAST_INTERVALS, settle_s=60.0))
    servers = first, leaving, spare = await halves_and_a_spare(router, model)
    await listen_for_a_lease(clock, *servers)
    leaving.state = pb.SERVER_STATE_DRAINING
    await leaving.beat_in_full()
    async with spare.living(), first.living():
        await until(lambda: spare.moves == ["3:6"])
    assert not first.moves


async def test_servers_move_one_at_a_time_to_the_slowest_blocks(router: Router, model: str) -> None:
    # All servers said the same speed at the start; then it turns out that one alone is a tenth as fast.
    servers = [MovingServer(router, model) for _ in range(6)]
    assert [await each.join() for each in servers] == ["0:3", "3:6"] * 3
    for each in servers:
        is_slow = each.held == "3:6"
        each.load = pb.ServerLoad(decode_tokens_per_second=10 if is_slow else 100)
    missing: list[int] = []

    async def watch() -> None:
        async for seen in router.stub.WatchPlacement(pb.WatchPlacementRequest(model=model)):
            missing.append(6 - sum(each.state == pb.SERVER_STATE_READY for each in seen.servers))
            assert not seen.uncovered

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as tasks:
        stop = asyncio.Event()

        async def live(server: MovingServer) -> None:
            async with server.living():
                await stop.wait()

        for each in servers:
            tasks.create_task(live(each))
        await until(lambda: any(each.moves for each in servers))
        await asyncio.sleep(2.5)  # there is time for a second move
        stop.set()
    assert not watching.done(), "a block was without a server"
    watching.cancel()
    # A third of 3 x 100 here and of 3 x 10 there; one fast one more there makes 43 of the 10, a second would leave 33.
    assert sum(len(each.moves) for each in servers) == 1
    assert max(missing) == 1


@pytest.mark.full
async def test_unstable_speeds_move_servers_ever_more_rarely(start_router: StartRouter, model: str) -> None:
    router = await start_router(intervals=replace(FAST_INTERVALS, between_moves_s=0.3))
    servers = [MovingServer(router, model) for _ in range(3)]
    assert [await each.join() for each in servers] == ["0:3", "3:6", "0:3"]
    began_s = asyncio.get_running_loop().time()
    moved_s: list[float] = []
    async with servers[0].living(), servers[1].living(), servers[2].living():
        while asyncio.get_running_loop().time() < began_s + 12:
            if (num_moves := sum(len(each.moves) for each in servers)) > len(moved_s):
                moved_s.append(asyncio.get_running_loop().time() - began_s)
                assert num_moves == len(moved_s)
            # A server without a replica is slow.
            held = [each.held for each in servers]
            for each in servers:
                speed = 10 if held.count(each.held) == 1 else 100
                each.load = pb.ServerLoad(decode_tokens_per_second=speed)
            await asyncio.sleep(0.05)
    # Each move takes 0.8 s, so without patience there were a dozen.
    assert 2 <= len(moved_s) <= 6


@pytest.mark.parametrize("num_servers, is_movable", [(2, False), (1, True)], ids=["explicit", "alone"])
async def test_the_router_orders_no_move_of_a_server_that_may_not_move(
    router: Router, model: str, num_servers: int, is_movable: bool
) -> None:
    servers = [MovingServer(router, model, movable=is_movable) for _ in range(num_servers)]
    for each in servers:
        await each.join("0:3")
    for _ in range(8):
        await asyncio.sleep(0.1)
        assert not any([(await each.beat_in_full()).HasField("move_to") for each in servers])


async def test_the_router_orders_no_move_while_a_server_joins(router: Router, model: str) -> None:
    spare = [MovingServer(router, model) for _ in range(2)]
    for each in spare:
        await each.join("0:3")
    newcomer = MovingServer(router, model)
    await newcomer.register("1:4")
    newcomer.state = pb.SERVER_STATE_JOINING
    for _ in range(8):
        assert not any([(await each.beat_in_full()).HasField("move_to") for each in (*spare, newcomer)])
        await asyncio.sleep(0.1)


async def test_a_move_order_lapses_when_the_placement_changes_before_its_heartbeat(
    start_router: StartRouter, model: str
) -> None:
    router = await start_router(lease_ms=30_000)
    servers = [MovingServer(router, model) for _ in range(2)]
    for each in servers:
        await each.join("0:3")

    async def is_ordered() -> bool:
        return await num_ordered(router, model=model, reason="covers") == 1

    await until(is_ordered)
    # An adapter takes no server away.
    adapter = pb.RegisteredAdapter(version=common_pb2.AdapterVersion(name="legal", digest="0" * 64), source="/adapters")
    await router.stub.AddAdapter(pb.AddAdapterRequest(model=model, adapter=adapter))
    assert sum([(await each.beat_in_full()).HasField("move_to") for each in servers]) == 1
    newcomer = MovingServer(router, model)
    assert await newcomer.register() == "3:6"
    assert not any([(await each.beat_in_full()).HasField("move_to") for each in servers])
    await newcomer.beat_in_full()
    await asyncio.sleep(0.5)
    assert not any([(await each.beat_in_full()).HasField("move_to") for each in servers])
