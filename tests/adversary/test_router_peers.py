"""Who reaches a router and means harm: names of models that do not exist, as many as it likes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import grpc
import pytest
from redis.asyncio import Redis

from corolla.local.redis_server import EmbeddedRedis
from corolla.router.watch import MOST_UNKNOWN_MODELS
from corolla.v1 import router_pb2 as pb
from tests.integration.refusals import refusal_of
from tests.integration.router.conftest import BlockServer, Router, running_router


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of these tests alone: they look at all of its keys."""
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


@pytest.fixture
async def router(redis_url: str) -> AsyncIterator[Router]:
    async with running_router(redis_url) as router:
        yield router


async def test_to_ask_for_models_that_do_not_exist_leaves_nothing(router: Router, redis_url: str) -> None:
    async with Redis.from_url(redis_url) as redis:
        before = set(await redis.keys())
        for number in range(20):
            await router.stub.GetPlacement(pb.GetPlacementRequest(model=f"nothing-{number}"))
            with pytest.raises(grpc.aio.AioRpcError):
                await router.stub.PlanChain(pb.PlanChainRequest(model=f"nothing-{number}"))
        assert set(await redis.keys()) == before


async def test_few_models_that_do_not_exist_are_watched_and_all_that_do(router: Router, redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        watches = []
        for number in range(MOST_UNKNOWN_MODELS):
            call = router.stub.WatchPlacement(pb.WatchPlacementRequest(model=f"none-{number}"))
            stack.callback(call.cancel)
            watches.append(call)
            assert (await call.read()).num_model_blocks == 0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stub.WatchPlacement(pb.WatchPlacementRequest(model="none-more")).read()
        assert refusal_of(refused.value).reason == "QUEUE_FULL"
        # One of them comes to be: its watch hears of it at once, and another may take its place.
        await BlockServer(router, "none-3", capacity_blocks=30).join()
        async with asyncio.timeout(30):
            while not (await watches[3].read()).servers:
                pass
        another = router.stub.WatchPlacement(pb.WatchPlacementRequest(model="none-more"))
        stack.callback(another.cancel)
        assert (await another.read()).num_model_blocks == 0
        async with Redis.from_url(redis_url) as redis:
            assert not await redis.keys("*none-more*")
