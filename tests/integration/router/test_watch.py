"""Pushes to watchers, and what becomes of routers when Redis goes and comes."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import StartupError
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.settings import load
from corolla.router.service import RouterProcess
from corolla.router.settings import RouterSettings
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.beginnings import pack
from tests.embedded_redis import EmbeddedRedis
from tests.integration import waiting
from tests.integration.router.conftest import FAST, FAST_INTERVALS, BlockServer, Router, StartRouter, refusal


@asynccontextmanager
async def watching(
    router: Router, model: str, *, takes_changes: bool = False
) -> AsyncIterator["asyncio.Queue[pb.Placement]"]:
    pushed: asyncio.Queue[pb.Placement] = asyncio.Queue()

    async def follow() -> None:
        request = pb.WatchPlacementRequest(model=model, takes_changes=takes_changes)
        async for placement in router.stub.WatchPlacement(request):
            await pushed.put(placement)

    task = asyncio.create_task(follow())
    try:
        yield pushed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(pushed: "asyncio.Queue[pb.Placement]", wanted: Any) -> pb.Placement:
    async with asyncio.timeout(30):
        while True:
            placement = await pushed.get()
            if wanted(placement):
                return placement


async def test_changes_are_pushed_by_every_router(start_router: StartRouter, model: str) -> None:
    # A long timer: what arrives at all came through the stream of changes.
    intervals = replace(FAST_INTERVALS, relist_s=60)
    first, second = [await start_router(lease_ms=300_000, intervals=intervals) for _ in range(2)]
    async with watching(first, model) as near, watching(second, model) as far:
        for pushed in (near, far):
            await until(pushed, lambda placement: placement.num_model_blocks == 0)
        server = BlockServer(first, model, capacity_blocks=30)
        await server.register()
        for pushed in (near, far):
            joining = await until(pushed, lambda placement: len(placement.servers) == 1)
            assert [(each.start, each.end) for each in joining.uncovered] == [(0, 30)]
            assert not joining.HasField("cheapest_chain")
        await server.beat()
        for pushed in (near, far):
            ready = await until(pushed, lambda placement: not placement.uncovered)
            assert ready.HasField("cheapest_chain")
            assert ready.version > joining.version


async def test_who_takes_changes_is_sent_a_whole_placement_and_then_what_changes(router: Router, model: str) -> None:
    servers = [BlockServer(router, model, capacity_blocks=30) for _ in range(3)]
    for each in servers:
        await each.join("0:30")
    async with (
        watching(router, model, takes_changes=True) as pushed,
        watching(router, model, takes_changes=True) as other,
    ):
        first = await pushed.get()
        assert len(first.servers) == 3
        assert not first.HasField("change")
        assert 0 <= first.turn < 1
        assert (await other.get()).turn != first.turn
        servers[0].load.num_sessions = 7
        servers[0].load.beginnings = pack([3, 2, 1])
        await servers[0].beat()
        (changed,) = (await until(pushed, lambda placement: placement.servers)).servers
        assert (changed.server.server_id, changed.load.num_sessions) == (servers[0].server_id, 7)
        assert (changed.server.address, changed.HasField("span")) == ("", False)
        assert changed.load.beginnings == pack([3, 2, 1])
        servers[0].load.beginnings = pack([4, 3, 2, 1])
        await servers[0].beat()
        (changed,) = (await until(pushed, lambda placement: placement.servers)).servers
        assert changed.load.beginnings == pack([4]), "the others are known"
        async with watching(router, model, takes_changes=True) as late:
            announced = {each.server.server_id: each.load.beginnings for each in (await late.get()).servers}
            assert announced[servers[0].server_id] == pack([4, 3, 2, 1])
        await servers[1].leave()
        gone = await until(pushed, lambda placement: placement.change.gone_server_ids)
        assert list(gone.change.gone_server_ids) == [servers[1].server_id]
        assert gone.change.same_adapters
        assert gone.HasField("cheapest_chain")


async def test_an_expired_lease_is_pushed(start_router: StartRouter, model: str) -> None:
    router = await start_router(lease_ms=2000)
    await BlockServer(router, model, capacity_blocks=30).join()
    async with watching(router, model) as pushed:
        await until(pushed, lambda placement: not placement.uncovered)
        await until(pushed, lambda placement: not placement.servers)


async def test_load_alone_is_pushed_now_and_then(router: Router, model: str) -> None:
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    async with watching(router, model) as pushed, server.beating():
        await until(pushed, lambda placement: not placement.uncovered)
        server.load.num_free_pages = 7
        seen = await until(pushed, lambda placement: placement.servers[0].load.num_free_pages == 7)
        await asyncio.sleep(0.7)
        assert seen.version > 0
        assert pushed.empty()


async def test_a_stopping_router_ends_its_watches(redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, may_stop = RpcServer.stop, asyncio.Event()

    async def stop_later(server: RpcServer, grace_s: float) -> None:
        await may_stop.wait()
        await stop(server, grace_s)

    monkeypatch.setattr(RpcServer, "stop", stop_later)
    process = RouterProcess(load(RouterSettings, **{**FAST, "redis_url": redis_url, "grace_s": 120}))
    await process.start()
    async with open_channel(f"127.0.0.1:{process.port}") as channel:
        router = Router(process, channel)
        call = router.stub.WatchPlacement(pb.WatchPlacementRequest(model=model))
        await call.read()
        reading = asyncio.create_task(refusal(call.read()))
        started = time.monotonic()
        stopping = asyncio.create_task(process.stop())
        assert (await reading).reason == "SERVICE_STOPPING"
        # A watcher that asks again at once would hold it up.
        again = router.stub.WatchPlacement(pb.WatchPlacementRequest(model=model), timeout=30)
        assert (await refusal(again.read())).reason == "SERVICE_STOPPING"
        may_stop.set()
        await stopping
        assert time.monotonic() - started < 60, "it waited for its grace to end"


async def test_a_frozen_redis_is_an_error_in_time_and_heals(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url, lease_ms=60_000)
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    async with watching(router, model) as pushed:
        await until(pushed, lambda placement: not placement.uncovered)
        with own_redis.frozen():
            for _ in range(2):
                started = time.monotonic()
                errors = await asyncio.gather(
                    refusal(server.beat()), refusal(router.stub.PlanChain(pb.PlanChainRequest(model=model)))
                )
                assert {error.reason for error in errors} == {"STORE_UNAVAILABLE"}
                assert time.monotonic() - started < 10
            assert await health(router) == health_pb2.HealthCheckResponse.SERVING
            assert "corolla_store_up 0.0" in await metrics(router)
        await until_exported(router, "corolla_store_up 1.0")
        await server.beat()
        server.state = pb.SERVER_STATE_DRAINING
        await server.beat()
        await until(pushed, lambda placement: len(placement.uncovered) > 0)


async def test_who_comes_while_redis_is_frozen_gets_what_was_pushed_last(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url, lease_ms=60_000)
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    async with watching(router, model) as pushed:
        last = await until(pushed, lambda placement: not placement.uncovered)
    with own_redis.frozen():
        async with watching(router, model) as pushed:
            assert (await until(pushed, lambda placement: True)).servers == last.servers
    server.state = pb.SERVER_STATE_DRAINING
    async with server.beating(), watching(router, model) as pushed:
        await until(pushed, lambda placement: bool(placement.uncovered))
    async with watching(router, model) as pushed:
        assert (await until(pushed, lambda placement: True)).uncovered


async def test_after_redis_has_lost_everything_servers_register_again(
    start_router: StartRouter, own_redis: EmbeddedRedis, tmp_path: Path, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url)
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    async with watching(router, model) as pushed, server.beating():
        before = await until(pushed, lambda placement: not placement.uncovered)
        own_redis.stop()
        assert (await refusal(router.stub.GetPlacement(pb.GetPlacementRequest(model=model)))).reason == (
            "STORE_UNAVAILABLE"
        )
        again = EmbeddedRedis.start(tmp_path, own_redis.port)
        try:
            after = await until(pushed, lambda placement: placement.version > before.version)
            if after.uncovered:
                after = await until(pushed, lambda placement: not placement.uncovered)
            assert after.HasField("cheapest_chain")
        finally:
            again.stop()


async def test_what_redis_has_lost_of_adapters_is_registered_again(
    start_router: StartRouter, own_redis: EmbeddedRedis, tmp_path: Path, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url)
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()

    def adapter(name: str) -> pb.RegisteredAdapter:
        version = common_pb2.AdapterVersion(name=name, digest="0" * 64)
        return pb.RegisteredAdapter(version=version, source="/adapters", tenants=["acme"])

    for name in ("legal", "tone"):
        await router.stub.AddAdapter(pb.AddAdapterRequest(model=model, adapter=adapter(name)))
    await router.stub.RemoveAdapter(pb.RemoveAdapterRequest(model=model, name="tone"))
    async with watching(router, model) as pushed, server.beating():
        before = await until(pushed, lambda placement: len(placement.adapters) == 1)
        own_redis.stop()
        again = EmbeddedRedis.start(tmp_path, own_redis.port)
        try:
            after = await until(pushed, lambda placement: placement.version > before.version and placement.adapters)
            assert list(after.adapters) == [adapter("legal")]
        finally:
            again.stop()


async def test_the_start_waits_for_redis(start_router: StartRouter, tmp_path: Path) -> None:
    redis = EmbeddedRedis.start(tmp_path)
    port = redis.port
    redis.stop()
    starting = asyncio.create_task(start_router(redis_url=redis.url))
    await asyncio.sleep(0.5)
    assert not starting.done()
    redis = EmbeddedRedis.start(tmp_path, port)
    try:
        router = await asyncio.wait_for(starting, 30)
        assert await health(router) == health_pb2.HealthCheckResponse.SERVING
    finally:
        redis.stop()


@pytest.mark.parametrize("url", ["http://127.0.0.1:6379", "redis://host:seven/0", "redis://h:1/0?colour=red", ""])
async def test_a_bad_address_ends_the_start_without_quoting_it(start_router: StartRouter, url: str) -> None:
    with pytest.raises(StartupError, match="COROLLA_REDIS_URL") as caught:
        await start_router(redis_url=url)
    assert not url or url not in caught.value.message


async def test_a_database_that_redis_lacks_ends_the_start(start_router: StartRouter, redis_url: str) -> None:
    with pytest.raises(StartupError, match="COROLLA_REDIS_URL"):
        await start_router(redis_url=redis_url.removesuffix("0") + "4711")


async def test_gauges_show_the_contents_of_the_store(start_router: StartRouter, model: str) -> None:
    router = await start_router(lease_ms=2000)
    server = BlockServer(router, model)
    server.load.num_tokens_at_risk = 7
    await server.join("0:10")
    async with server.beating():
        await until_exported(
            router,
            f'corolla_span_loss_seconds{{model="{model}",span="0:10"}} +Inf',
            f'corolla_span_ready_replicas{{model="{model}",span="0:10"}} 1.0',
            f'corolla_uncovered_blocks{{model="{model}"}} 20.0',
            f'corolla_registered_servers{{model="{model}",state="ready"}} 1.0',
            f'corolla_sessions{{model="{model}"}} 0.0',
            'corolla_redis_script_seconds_count{script="snapshot"}',
        )
    await until_exported(
        router,
        f'corolla_span_ready_replicas{{model="{model}",span="0:10"}} 0.0',
        f'corolla_span_loss_seconds{{model="{model}",span="0:10"}} 0.0',
    )


async def health(router: Router) -> int:
    stub: Any = health_pb2_grpc.HealthStub(router.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service="corolla.v1.RouterService"), timeout=30)
    return int(answer.status)


async def until_exported(router: Router, *lines: str) -> None:
    async def are_exported() -> bool:
        text = await metrics(router)
        return all(line in text for line in lines)

    await waiting.until(are_exported)


async def metrics(router: Router) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{router.process.metrics_port}/metrics", timeout=30) as page:
            return str(page.read().decode())

    return await asyncio.to_thread(read)
