"""Leases, spans and chains, through gRPC and a real Redis."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis

from corolla.chassis.errors import InvalidRequest
from corolla.chassis.metrics import new_registry
from corolla.local.readiness import remove_dead_server
from corolla.router import mirror
from corolla.router.metrics import RouterMetrics
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.router.store import Store, key_prefix
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.network import Network
from corolla.wire.span import Span
from tests.embedded_redis import EmbeddedRedis
from tests.integration.router.conftest import FAST_INTERVALS, BlockServer, Router, StartRouter, refusal, spans
from tests.integration.waiting import until


async def placement(router: Router, model: str) -> pb.Placement:
    answer: pb.Placement = await router.stub.GetPlacement(pb.GetPlacementRequest(model=model), timeout=30)
    return answer


async def plan(router: Router, model: str, **facts: object) -> pb.PlanChainResponse:
    answer: pb.PlanChainResponse = await router.stub.PlanChain(
        pb.PlanChainRequest(model=model, **facts),  # type: ignore[arg-type]
        timeout=30,
    )
    return answer


async def test_three_servers_fill_the_model_and_make_a_chain(router: Router, model: str) -> None:
    servers = [BlockServer(router, model) for _ in range(3)]
    assert [await each.join() for each in servers] == ["0:10", "10:20", "20:30"]
    chain = (await plan(router, model, num_tokens=16 * 100)).chain
    assert spans(chain) == ["0:10", "10:20", "20:30"]
    assert [hop.server_id for hop in chain.hops] == [each.server_id for each in servers]
    seen = await placement(router, model)
    assert (seen.num_model_blocks, list(seen.uncovered), len(seen.servers)) == (30, [], 3)
    assert seen.HasField("cheapest_chain")


async def test_a_server_gets_what_its_memory_holds_with_what_lies_at_the_ends(router: Router, model: str) -> None:
    facts = {"capacity_blocks": 30, "weight_blocks": 12.0, "head_blocks": 4.5}
    servers = [BlockServer(router, model, num_model_blocks=26, **facts) for _ in range(3)]
    assert [await each.join() for each in servers] == ["7:19", "0:7", "19:26"]


async def test_a_draft_model_takes_memory_and_time_with_the_last_block(router: Router, model: str) -> None:
    facts = {"num_model_blocks": 20, "capacity_blocks": 20, "draft_blocks": 6.0}
    servers = [BlockServer(router, model, **facts, weight_blocks=13.0) for _ in range(2)]
    assert [await each.join() for each in servers] == ["0:13", "13:20"]
    # The time decides: it gets as many blocks more as would not make the last block slower than the first one.
    others = [BlockServer(router, f"{model}-2", **{**facts, "capacity_blocks": 15}) for _ in range(2)]
    assert [await each.join() for each in others] == ["0:15", "12:20"]


async def test_a_server_without_memory_for_a_block_is_refused(router: Router, model: str) -> None:
    failure = await refusal(BlockServer(router, model, weight_blocks=0.5, head_blocks=4.5).register())
    assert failure.reason == "SPAN_REFUSED"


async def test_sessions_over_equal_replicas_share_routes(router: Router, model: str) -> None:
    for _ in range(6):
        await BlockServer(router, model, capacity_blocks=15).join()
    chains = [(await plan(router, model)).chain for _ in range(30)]
    routes = Counter(tuple(hop.server_id for hop in chain.hops) for chain in chains)
    assert sorted(routes.values()) == [10, 10, 10]


async def test_servers_of_a_kind_get_equal_blocks(router: Router, model: str) -> None:
    joining = [
        BlockServer(router, model, capacity_blocks=15, kind=kind, decode_tokens_per_second=speed)
        for kind, speed in (("a", 100.0), ("b", 10.0), ("a", 100.0), ("b", 10.0))
    ]
    assert [await each.join() for each in joining] == ["0:15", "15:30", "0:15", "15:30"]
    # A server that leaves does not count as a partner.
    joining[2].state = pb.SERVER_STATE_DRAINING
    await joining[2].beat()
    assert await BlockServer(router, model, capacity_blocks=15, kind="a", decode_tokens_per_second=1.0).join() == "0:15"


async def test_twenty_at_once_over_two_routers_get_no_span_twice(start_router: StartRouter, model: str) -> None:
    routers = [await start_router(lease_ms=30_000) for _ in range(2)]
    servers = [BlockServer(routers[index % 2], model, capacity_blocks=3, num_model_blocks=60) for index in range(20)]
    given = await asyncio.gather(*(each.register() for each in servers))
    assert sorted(given, key=lambda text: int(text.split(":")[0])) == [f"{b}:{b + 3}" for b in range(0, 60, 3)]


async def test_joining_and_draining_servers_are_placed_but_not_planned(router: Router, model: str) -> None:
    server = BlockServer(router, model, capacity_blocks=30)
    await server.register()
    assert (await refusal(plan(router, model))).metadata == {"uncovered_blocks": "0:30"}
    await server.beat()
    assert spans((await plan(router, model)).chain) == ["0:30"]
    server.state = pb.SERVER_STATE_DRAINING
    await server.beat()
    error = await refusal(plan(router, model))
    assert (error.reason, error.retry_after_s) == ("NO_CHAIN", 2.0)
    assert [each.state for each in (await placement(router, model)).servers] == [pb.SERVER_STATE_DRAINING]


async def test_the_router_removes_a_deregistered_server_at_once(router: Router, model: str) -> None:
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    request = pb.DeregisterServerRequest(model=model, server_id=server.server_id)
    for _ in range(2):
        await router.stub.DeregisterServer(request, timeout=30)
    assert len((await placement(router, model)).servers) == 0
    assert (await refusal(server.beat())).reason == "LEASE_LOST"
    assert (await refusal(plan(router, model))).reason == "NO_CHAIN"


async def test_explicit_spans_are_kept_or_refused(router: Router, model: str) -> None:
    assert await BlockServer(router, model).register("7:12") == "7:12"
    for span, words in (("25:31", "beyond"), ("0:11", "room for 10")):
        error = await refusal(BlockServer(router, model).register(span))
        assert error.reason == "SPAN_REFUSED"
        assert words in error.message


async def test_one_model_has_one_number_of_blocks(router: Router, model: str) -> None:
    server = BlockServer(router, model)
    await server.register()
    other = BlockServer(router, model, num_model_blocks=24)
    assert (await refusal(other.register())).reason == "SPAN_REFUSED"
    # Alone, it is right: the model was exchanged.
    await router.stub.DeregisterServer(pb.DeregisterServerRequest(model=model, server_id=server.server_id))
    assert await other.register() == "0:10"


async def test_each_fingerprint_is_covered_by_itself(router: Router, model: str) -> None:
    for fingerprint in "fg":
        for expected in ("0:15", "15:30"):
            server = BlockServer(router, model, fingerprint=fingerprint, capacity_blocks=15)
            assert await server.join() == expected
    for fingerprint in "fg":
        assert (await plan(router, model, fingerprint=fingerprint)).chain.fingerprint == fingerprint
    assert (await refusal(plan(router, model, fingerprint="h"))).metadata == {"uncovered_blocks": "0:30"}


async def test_the_router_plans_servers_with_enough_pages(router: Router, model: str) -> None:
    small, large = (BlockServer(router, model, capacity_blocks=30) for _ in range(2))
    small.load.max_session_tokens = 32
    large.load.num_queued_steps = 50
    await small.join("0:30")
    await large.join("0:30")
    assert (await plan(router, model, num_tokens=32)).chain.hops[0].server_id == small.server_id
    assert (await plan(router, model, num_tokens=33)).chain.hops[0].server_id == large.server_id
    error = await refusal(plan(router, model, num_tokens=1601))
    assert (error.reason, error.retry_after_s) == ("OUT_OF_PAGES", 1.0)


async def test_excluded_servers_are_left_out(router: Router, model: str) -> None:
    servers = [BlockServer(router, model, capacity_blocks=30) for _ in range(2)]
    for each in servers:
        await each.join()
    for left_out, taken in (servers, servers[::-1]):
        answer = await plan(router, model, excluded_server_ids=[left_out.server_id])
        assert answer.chain.hops[0].server_id == taken.server_id
    everyone = [each.server_id for each in servers]
    assert (await refusal(plan(router, model, excluded_server_ids=everyone))).reason == "NO_CHAIN"


async def test_a_model_without_servers_is_not_found(router: Router, model: str) -> None:
    error = await refusal(plan(router, model))
    assert (error.reason, error.message) == ("MODEL_NOT_FOUND", "no block server has registered for this model")
    assert await placement(router, model) == pb.Placement(model=model)


@pytest.mark.parametrize("comes", ["before it is forgotten", "afterwards"])
async def test_a_model_that_is_forgotten_while_its_first_server_comes_stays_known(
    redis_url: str, router: Router, model: str, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """Otherwise the router would update no gauges, layouts or leases of the model any more."""
    server = BlockServer(router, model)
    store = Store(redis_url, 5.0, RouterMetrics(new_registry()))
    registry, forget, num_comings = Registry(store, lease_ms=600), Store.forget_model, 0

    async def come_and_forget(store: Store, name: str) -> None:
        nonlocal num_comings
        if name == model and comes == "before it is forgotten":
            num_comings += 1
            await server.join("0:10")
        await forget(store, name)

    monkeypatch.setattr(Store, "forget_model", come_and_forget)
    if comes == "afterwards":
        forgotten = Forgotten(store, registry)
        await forgotten.register(server.description, Span(0, 10))
        num_comings = forgotten.num_forgotten
    else:
        await registry.forget(model)
    assert num_comings == 1
    assert model in await registry.models()
    await store.close()


async def test_a_mark_that_ends_is_gone_at_the_next_reading(redis_url: str, router: Router, model: str) -> None:
    """The stream of changes does not name the end of a mark."""
    server = BlockServer(router, model)
    await server.join()
    store = Store(redis_url, 5.0, RouterMetrics(new_registry()))
    registry = Registry(store, lease_ms=60_000, read_whole_s=1e9)
    await registry.snapshot(model)
    await registry.withhold(model, server.server_id, "unready", 300)
    version = (await registry.snapshot(model)).version

    async def is_free() -> bool:
        roster = await registry.snapshot(model)
        assert roster.version == version
        return not roster.servers[0].suspected

    assert not await is_free()
    await until(is_free)
    await store.close()


async def test_a_server_is_suspected_by_the_word_of_two_until_it_is_heard(
    redis_url: str, router: Router, model: str
) -> None:
    server = BlockServer(router, model)
    await server.join()
    store = Store(redis_url, 5.0, RouterMetrics(new_registry()))
    registry = Registry(store, lease_ms=60_000, read_whole_s=1e9)

    async def is_suspected() -> bool:
        return (await registry.snapshot(model)).servers[0].suspected

    # What one says counts for the time of a lease.
    brief = Registry(store, lease_ms=50)
    await brief.report(model, server.server_id, "other")
    await asyncio.sleep(0.1)
    for _ in range(3):
        await registry.report(model, server.server_id, "one")
        assert not await is_suspected()
    await registry.report(model, "unknown", "other")
    assert not await is_suspected()
    await registry.report(model, server.server_id, "other")
    assert await is_suspected()
    await server.beat()
    assert not await is_suspected()
    await registry.report(model, server.server_id, "one")
    assert not await is_suspected(), "the other one spoke before the server was heard"
    await store.close()


async def test_all_servers_of_a_doubted_host_are_doubted(redis_url: str, router: Router, model: str) -> None:
    servers = [BlockServer(router, model, address=address) for address in ("a:1", "a:2", "b:1")]
    for each in servers:
        await each.join("0:10")
    store = Store(redis_url, 5.0, RouterMetrics(new_registry()))
    registry = Registry(store, lease_ms=60_000, read_whole_s=1e9)
    await registry.snapshot(model)
    await registry.doubt(model, servers[0].server_id)
    doubted = {each.server.address for each in (await registry.snapshot(model)).servers if each.doubted}
    assert doubted == {"a:1", "a:2"}
    await store.close()


async def test_a_version_without_its_change_is_read_as_a_whole(redis_url: str, router: Router, model: str) -> None:
    """The store lost writes, or another release wrote them."""
    servers = [BlockServer(router, model) for _ in range(2)]
    for each in servers:
        await each.join()
    store = Store(redis_url, 5.0, RouterMetrics(new_registry()))
    registry = Registry(store, lease_ms=60_000, read_whole_s=1e9)
    before = await registry.snapshot(model)
    async with Redis.from_url(redis_url) as redis:
        await redis.hdel(key_prefix(model) + "servers", servers[0].server_id)
        assert await registry.snapshot(model) == before
        await redis.hincrby(key_prefix(model) + "placement", "version", 1)
    (left,) = (await registry.snapshot(model)).servers
    assert left.server.server_id == servers[1].server_id
    await store.close()


class Forgotten(Registry):
    """Another router forgets each model between the choice of a span and its coming into force."""

    def __init__(self, store: Store, other: Registry) -> None:
        super().__init__(store, lease_ms=600)
        self.num_forgotten = 0
        self._other = other

    async def snapshot(self, model: str) -> Roster:
        roster = await super().snapshot(model)
        self.num_forgotten += 1
        await self._other.forget(model)
        return roster


async def test_the_router_validates_registrations(router: Router, model: str) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"server_id": ""}, "server.server_id"),
        ({"server_id": "a b"}, "server.server_id"),
        ({"model": ""}, "server.model"),
        ({"model": "x" * 257}, "server.model"),
        ({"model": "a\nb"}, "server.model"),
        ({"fingerprint": ""}, "server.fingerprint"),
        ({"zone": "a\x00"}, "server.zone"),
        ({"address": "nowhere"}, "server.address"),
        ({"address": "host:0"}, "server.address"),
        ({"address": "host:65536"}, "server.address"),
        ({"address": "host:1\n"}, "server.address"),
        ({"num_model_blocks": 0}, "server.num_model_blocks"),
        ({"num_model_blocks": 1025}, "server.num_model_blocks"),
        ({"capacity_blocks": 0}, "server.capacity_blocks"),
        ({"decode_tokens_per_second": float("nan")}, "server.decode_tokens_per_second"),
        ({"decode_tokens_per_second": -1.0}, "server.decode_tokens_per_second"),
        ({"decode_tokens_per_second": 2e9}, "server.decode_tokens_per_second"),
        ({"prefill_tokens_per_second": float("inf")}, "server.prefill_tokens_per_second"),
    ]
    for facts, field in rows:
        error = await refusal(BlockServer(router, **{"model": model, **facts}).register())
        assert isinstance(error, InvalidRequest)
        assert [name for name, _ in error.violations] == [field]


async def test_who_started_a_server_that_died_removes_it_before_its_lease_ends(router: Router, model: str) -> None:
    dead, other = BlockServer(router, model), BlockServer(router, model)
    for each in (dead, other):
        await each.join()
    address = f"127.0.0.1:{router.process.port}"
    for _ in range(2):
        await asyncio.to_thread(remove_dead_server, address, Network(), model, dead.description.address)
        assert [each.server.server_id for each in (await placement(router, model)).servers] == [other.server_id]


def test_without_a_router_nothing_is_removed_and_nothing_fails() -> None:
    remove_dead_server("127.0.0.1:1", Network(), "tiny", "127.0.0.1:2")


async def test_the_router_validates_other_requests(router: Router, model: str) -> None:
    # The placement of a single model may be asked for without its name.
    for each in ("one", "other"):
        await BlockServer(router, f"{each}-{model}").join()
    server = BlockServer(router, model)
    stub, name = router.stub, server.server_id
    load = pb.ServerLoad(decode_step_seconds=float("inf"))
    crowd = pb.ServerLoad(decode_batch_rows=float("nan"))
    liar = pb.ServerLoad(decode_tokens_per_second=2e9)
    block = common_pb2.BlockSpan(start=0, end=1)
    keeper, empty = pb.ServerLoad(spare_spans=[block] * 17), pb.ServerLoad(spare_spans=[block, common_pb2.BlockSpan()])
    ready = pb.SERVER_STATE_READY
    record = pb.SessionRecord(model=model, session_id="A" * 32)
    for call, field in (
        (server.register("5:5"), "span"),
        (stub.Heartbeat(pb.HeartbeatRequest(model=model, server_id=name)), "state"),
        (stub.Heartbeat(pb.HeartbeatRequest(server_id=name, state=ready)), "model"),
        (stub.Heartbeat(pb.HeartbeatRequest(model=model, server_id=name, state=ready, load=load)),
         "load.decode_step_seconds"),
        (stub.Heartbeat(pb.HeartbeatRequest(model=model, server_id=name, state=ready, load=crowd)),
         "load.decode_batch_rows"),
        (stub.Heartbeat(pb.HeartbeatRequest(model=model, server_id=name, state=ready, load=liar)),
         "load.decode_tokens_per_second"),
        (stub.Heartbeat(pb.HeartbeatRequest(model=model, server_id=name, state=ready, load=keeper)),
         "load.spare_spans"),
        (stub.Heartbeat(pb.HeartbeatRequest(model=model, server_id=name, state=ready, load=empty)),
         "load.spare_spans"),
        (stub.DeregisterServer(pb.DeregisterServerRequest(model=model)), "server_id"),
        (plan(router, ""), "model"),
        (placement(router, ""), "model"),
        (stub.CreateSessionRecord(pb.CreateSessionRecordRequest(record=record)), "record.session_id"),
        (stub.GetSessionRecord(pb.GetSessionRecordRequest(model=model, session_id="0" * 31)), "session_id"),
        (stub.BeginTurn(pb.BeginTurnRequest(model=model, session_id="0" * 32)), "turn_id"),
        (stub.EndTurn(pb.EndTurnRequest(turn_id="t")), "record.session_id"),
        (stub.CountSessionRecords(pb.CountSessionRecordsRequest()), "model"),
        (stub.WatchPlacement(pb.WatchPlacementRequest()).read(), "model"),
    ):  # fmt: skip
        error = await refusal(call)
        assert isinstance(error, InvalidRequest)
        assert [each for each, _ in error.violations] == [field]


async def test_a_router_reads_an_adapter_once(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other routers on the same Redis would read it, too.
    read: list[pb.RegisteredAdapter] = []

    def check(each: pb.RegisteredAdapter) -> pb.RegisteredAdapter:
        read.append(each)
        return each

    monkeypatch.setattr(mirror, "check", check)
    router = await start_router(redis_url=own_redis.url)
    await BlockServer(router, model, capacity_blocks=30).join()
    adapter = pb.RegisteredAdapter(version=common_pb2.AdapterVersion(name="legal", digest="0" * 64), source="/adapters")
    await router.stub.AddAdapter(pb.AddAdapterRequest(model=model, adapter=adapter))
    for _ in range(3):
        assert spans((await plan(router, model)).chain) == ["0:30"]
        assert list((await placement(router, model)).adapters) == [adapter]
        await asyncio.sleep(FAST_INTERVALS.read_whole_s)
    assert read == [adapter]
