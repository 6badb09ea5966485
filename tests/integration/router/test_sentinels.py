"""Sentinels name the primary: a router goes on at the one that takes the place of a lost one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from corolla.router.redis_address import answers
from tests.integration.router.conftest import BlockServer, StartRouter
from tests.integration.router.test_outages import names
from tests.integration.router.test_sessions import TURN, Session
from tests.integration.waiting import until
from tests.sentinels import WatchedRedis
from tests.tiers import quick


@pytest.fixture
def redis(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[WatchedRedis]:
    """Comes before routers, so that they stop before it: without their store they wait for it."""
    with WatchedRedis(tmp_path, is_encrypted=getattr(request, "param", False)) as redis:
        yield redis


@pytest.mark.parametrize("redis", quick([False, True], False), indirect=True, ids=["plain", "encrypted"])
async def test_sessions_and_placement_outlive_the_primary(
    redis: WatchedRedis, start_router: StartRouter, model: str
) -> None:
    assert await answers(redis.url, timeout_s=5)
    if redis.doors is not None:
        assert not await answers(redis.url.partition("&ssl_ca_certs")[0], timeout_s=5), "nobody vouches for it"
    router = await start_router(redis_url=redis.url)
    server, session = BlockServer(router, model, capacity_blocks=30), Session(router, model)
    await server.join()
    await session.create()
    begun = await session.begin("1")
    await session.end("1", epoch=begun.epoch, store_id=begun.store_id, **TURN)
    redis.kill(lost := await redis.primary())

    async def is_written() -> bool:
        try:
            await session.begin("2")
        except grpc.aio.AioRpcError:
            return False
        return True

    await until(is_written)
    record = await session.get()
    assert list(record.token_log) == TURN["token_log"]
    assert record.store_id == begun.store_id
    assert await names(router, model) == {server.server_id}
    if redis.doors is not None:
        of_servers = [redis.doors.num_encrypted.pop(port) for port in (lost, redis.other(lost))]
        assert min(of_servers) > 0, "a fail-over leads to another server with TLS"
        assert max(redis.doors.num_encrypted.values()) > 0, "Sentinels are asked with TLS"


async def test_a_router_leaves_a_primary_that_has_been_replaced_and_still_takes_writes(
    redis: WatchedRedis, start_router: StartRouter, model: str
) -> None:
    """What it wrote there would be lost as soon as the Sentinels make a replica of it."""
    router = await start_router(redis_url=redis.url)
    before = Session(router, model)
    await before.create()
    # These leave more connections than the router uses below; a new one would ask the Sentinels anyway.
    await asyncio.gather(*(before.get() for _ in range(16)))
    async with Redis.from_url((await redis.replace()).url) as new:

        async def is_written_there() -> bool:
            session = Session(router, model)
            await session.create()
            return bool([key async for key in new.scan_iter(f"*:session:{session.session_id}")])

        await until(is_written_there)
    await before.begin("1")
