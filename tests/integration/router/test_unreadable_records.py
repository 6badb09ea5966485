"""A record of the router's own in Redis that cannot be read is passed over, logged and counted. No task ends of it."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from tests.embedded_redis import EmbeddedRedis
from tests.integration.router.conftest import FAST_INTERVALS, BlockServer, Router, StartRouter, refusal, spans
from tests.integration.router.test_registration import placement, plan
from tests.integration.router.test_watch import metrics
from tests.integration.waiting import until

Poison = Callable[[Redis, str, BlockServer], Awaitable[Any]]


def described(server: BlockServer, /, **facts: Any) -> bytes:
    """A server's record, with what is wrong in it."""
    placed = pb.PlacedServer(server=server.description, span=server.span)
    placed.MergeFrom(pb.PlacedServer(**facts))
    return server.description.address.encode() + b"\n" + placed.SerializeToString()


async def without_an_address(redis: Redis, prefix: str, server: BlockServer) -> None:
    await redis.hset(prefix + "servers", server.server_id, "no line feed")


async def with_other_bytes(redis: Redis, prefix: str, server: BlockServer) -> None:
    await redis.hset(prefix + "servers", server.server_id, b"a:1\n\xff\xff")


async def with_an_empty_span(redis: Redis, prefix: str, server: BlockServer) -> None:
    record = described(server, span=common_pb2.BlockSpan(start=70))
    await redis.hset(prefix + "servers", server.server_id, record)


async def beyond_the_model(redis: Redis, prefix: str, server: BlockServer) -> None:
    record = described(server, span=common_pb2.BlockSpan(end=4_000_000_000))
    await redis.hset(prefix + "servers", server.server_id, record)


async def with_a_speed_that_is_none(redis: Redis, prefix: str, server: BlockServer) -> None:
    record = described(server, server=pb.ServerDescription(decode_tokens_per_second=math.nan))
    await redis.hset(prefix + "servers", server.server_id, record)


async def with_another_lease(redis: Redis, prefix: str, server: BlockServer) -> None:
    await redis.hset(prefix + "leases", server.server_id, b"2\xff")


async def with_a_load_that_is_none(redis: Redis, prefix: str, server: BlockServer) -> None:
    load = pb.PlacedServer(state=pb.SERVER_STATE_READY, load=pb.ServerLoad(decode_tokens_per_second=math.inf))
    await redis.hset(prefix + "leases", server.server_id, b"2" + load.SerializeToString())


SERVERS: Final = [
    without_an_address, with_other_bytes, with_an_empty_span, beyond_the_model, with_a_speed_that_is_none,
    with_another_lease, with_a_load_that_is_none,
]  # fmt: skip


async def without_a_placement(redis: Redis, prefix: str, server: BlockServer) -> None:
    await redis.delete(prefix + "placement")


async def without_the_last_listening(redis: Redis, prefix: str, server: BlockServer) -> None:
    await redis.hset(prefix + "listening", "last", "yesterday")


def field(key: str, name: str, value: str) -> Poison:
    async def poison(redis: Redis, prefix: str, server: BlockServer) -> None:
        await redis.hset(prefix + key, name, value)

    return poison


def of_another_type(key: str) -> Poison:
    async def poison(redis: Redis, prefix: str, server: BlockServer) -> None:
        await redis.delete(prefix + key)
        await redis.set(prefix + key, "a string")

    return poison


def _prefix(model: str) -> str:
    return f"corolla:{{{model}}}:"


class Pair:
    """A router with a model whose records go bad, and another one, which comes later in every loop."""

    def __init__(self, router: Router, redis: Redis, model: str) -> None:
        self.router = router
        self.redis = redis
        self.model = f"a-{model}"
        self.healthy = f"b-{model}"
        self.servers = [BlockServer(router, self.model, movable=True) for _ in range(4)]

    async def start(self) -> None:
        for each in self.servers:
            await each.join()
        await BlockServer(self.router, self.healthy, capacity_blocks=30).join()
        await self._until_shown(self.model, 4)
        await self._until_shown(self.healthy, 1)

    async def poison(self, poison: Poison) -> None:
        await poison(self.redis, _prefix(self.model), self.servers[1])

    async def until_counted(self, kind: str, at_least: float) -> None:
        async def is_counted() -> bool:
            lines = (await metrics(self.router)).splitlines()
            found = [line for line in lines if "unreadable_records_total{" in line and f'kind="{kind}"' in line]
            return sum(float(line.rpartition(" ")[2]) for line in found) >= at_least

        await until(is_counted)

    async def check_that_all_goes_on(self) -> None:
        """Statistics, watches and moves of the other model, and the router's health."""
        watch = self.router.stub.WatchPlacement(pb.WatchPlacementRequest(model=self.healthy), timeout=30)
        first = await watch.read()
        await BlockServer(self.router, self.healthy, capacity_blocks=30).join()
        assert (await watch.read()).version > first.version
        watch.cancel()
        await self._until_shown(self.healthy, 2)
        stub: Any = health_pb2_grpc.HealthStub(self.router.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def _until_shown(self, model: str, num_ready: int) -> None:
        line = f'corolla_registered_servers{{model="{model}",state="ready"}} {float(num_ready)}'

        async def is_shown() -> bool:
            return line in await metrics(self.router)

        await until(is_shown)


@pytest.fixture
async def pair(start_router: StartRouter, own_redis: EmbeddedRedis, model: str) -> Pair:
    router = await start_router(redis_url=own_redis.url, lease_ms=60_000)
    pair = Pair(router, Redis.from_url(own_redis.url), model)
    await pair.start()
    return pair


@pytest.mark.parametrize("poison", SERVERS)
async def test_the_router_skips_a_server_with_a_bad_record(
    pair: Pair, poison: Poison, caplog: pytest.LogCaptureFixture
) -> None:
    watch = pair.router.stub.WatchPlacement(pb.WatchPlacementRequest(model=pair.model), timeout=30)
    await watch.read()
    await pair.poison(poison)
    await pair.until_counted("server", 2)
    await pair.check_that_all_goes_on()
    seen = await placement(pair.router, pair.model)
    assert {each.server.server_id for each in seen.servers} == {
        each.server_id for each in pair.servers if each is not pair.servers[1]
    }
    assert seen.uncovered
    logged = [each for each in caplog.records if "cannot be read" in each.message]
    assert [vars(each)["record"] for each in logged] == [pair.servers[1].server_id]
    # A server that registers takes its place.
    replacement = BlockServer(pair.router, pair.model, address=pair.servers[1].description.address)
    assert await replacement.join("10:20") == "10:20"
    while (await watch.read()).uncovered:
        pass
    watch.cancel()
    assert spans((await plan(pair.router, pair.model)).chain)[1] == "10:20"


@pytest.mark.parametrize(
    "poison",
    [without_a_placement, field("placement", "version", "new"), field("placement", "blocks", "many"),
     field("placement", "blocks", "99999999999"), without_the_last_listening],
    ids=["no placement", "version", "blocks", "too many blocks", "listening"],
)  # fmt: skip
async def test_a_bad_figure_of_the_placement_heals(pair: Pair, poison: Poison) -> None:
    watch = pair.router.stub.WatchPlacement(pb.WatchPlacementRequest(model=pair.model), timeout=30)
    await watch.read()
    await pair.poison(poison)
    await pair.check_that_all_goes_on()
    seen = await placement(pair.router, pair.model)
    assert (seen.num_model_blocks, len(seen.servers), list(seen.uncovered)) == (30, 4, [])
    await BlockServer(pair.router, pair.model).join()
    assert len((await placement(pair.router, pair.model)).servers) == 5
    watch.cancel()


@pytest.mark.parametrize("key", ["servers", "leases", "heard", "placement", "changes", "listening", "addresses"])
async def test_a_key_of_another_type_costs_its_model_only(pair: Pair, key: str) -> None:
    watch = pair.router.stub.WatchPlacement(pb.WatchPlacementRequest(model=pair.model), timeout=30)
    await watch.read()
    await pair.poison(of_another_type(key))
    if key == "addresses":
        assert (await refusal(BlockServer(pair.router, pair.model).register())).reason == "INTERNAL"
    else:
        # A router reads what has not changed with the next whole placement.
        await asyncio.sleep(FAST_INTERVALS.read_whole_s)
        assert (await refusal(plan(pair.router, pair.model))).reason == "INTERNAL"
        await pair.until_counted("key", 5)
    await pair.check_that_all_goes_on()
    assert "corolla_store_up 1.0" in await metrics(pair.router)
    watch.cancel()


async def test_a_name_that_is_no_text_is_no_model(pair: Pair) -> None:
    await pair.redis.sadd("corolla:models", b"\xff\xfe")
    await pair.until_counted("model", 5)
    await pair.check_that_all_goes_on()


async def test_a_bad_order_moves_no_server(pair: Pair) -> None:
    server, prefix = pair.servers[0], _prefix(pair.model)
    version: Any = await pair.redis.hget(prefix + "placement", "version")
    order: Any = {"server": server.server_id, "address": server.description.address, "span": "here", "version": version}
    await pair.redis.hset(prefix + "order", mapping=order)
    answer = await server.beat_in_full()
    assert not answer.HasField("move_to")
    await pair.until_counted("order", 1)
