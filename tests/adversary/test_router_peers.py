"""A router bears peers that mean harm: models that do not exist, and servers that are not what they say."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import grpc
import pytest
from redis.asyncio import Redis

from corolla.router.validation import MOST_MODEL_BLOCKS
from corolla.router.watch import MOST_UNKNOWN_MODELS
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from tests.embedded_redis import EmbeddedRedis
from tests.integration.refusals import refusal_of
from tests.integration.router.conftest import BlockServer, Router, refusal, running_router, spans


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis for these tests alone: they look at all of its keys."""
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    yield server.url
    server.stop()


@pytest.fixture
def model() -> str:
    return f"model-{secrets.token_hex(6)}"


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


def liar_at(router: Router, model: str, port: int = 1, **facts: object) -> BlockServer:
    """It says that it is faster than anything that there is."""
    return BlockServer(router, model, address=f"10.6.6.6:{port}", decode_tokens_per_second=1e9, **facts)


async def shares(router: Router, model: str, num_plans: int = 60) -> dict[str, int]:
    """How many plans each server gets that has one."""
    counted: dict[str, int] = {}
    for _ in range(num_plans):
        chain = (await router.stub.PlanChain(pb.PlanChainRequest(model=model))).chain
        for hop in chain.hops:
            counted[hop.server_id] = counted.get(hop.server_id, 0) + 1
    return counted


async def test_a_claim_that_tokens_do_not_bear_out_gives_no_advantage_under_no_name(router: Router, model: str) -> None:
    honest = [BlockServer(router, model, capacity_blocks=30) for _ in range(3)]
    liar = liar_at(router, model, capacity_blocks=30)
    for server in (*honest, liar):
        await server.join("0:30")
        server.load.decode_step_seconds = 1e-9 if server is liar else 0.3
        await server.beat()
    accepted = await shares(router, model, 20)
    assert accepted.keys() == {liar.server_id}
    await router.stub.ReportServer(pb.ReportServerRequest(model=model, server_id=liar.server_id, slow=True))
    await liar.beat()
    assert (await shares(router, model)).keys() >= {each.server_id for each in honest}
    # Its next incarnation is at the same host.
    await liar.leave()
    again = liar_at(router, model, 2, capacity_blocks=30)
    await again.join("0:30")
    await again.beat()
    assert (await shares(router, model)).keys() >= {each.server_id for each in honest}


@pytest.mark.parametrize("end", [31, 2**32 - 1])
async def test_no_server_keeps_spans_beyond_its_model(router: Router, model: str, end: int) -> None:
    server = BlockServer(router, model)
    await server.join()
    server.load.spare_spans.extend([common_pb2.BlockSpan(start=10, end=end)] * 16)
    assert (await refusal(server.beat_in_full())).message.startswith("load.spare_spans: ")
    if end > MOST_MODEL_BLOCKS:
        assert (await refusal(server.beat())).message.startswith("load.spare_spans: ")
    else:
        # The heartbeat does not say how many blocks the model has, so what the store lists is refused.
        await server.beat()
        placement = await router.stub.GetPlacement(pb.GetPlacementRequest(model=model))
        assert not [span for each in placement.servers for span in each.load.spare_spans]


async def test_an_honest_server_that_is_far_faster_keeps_its_plans(router: Router, model: str) -> None:
    slow = [BlockServer(router, model, capacity_blocks=30) for _ in range(3)]
    fast = BlockServer(router, model, capacity_blocks=30, decode_tokens_per_second=2000.0)
    for server in (*slow, fast):
        await server.join("0:30")
    assert (await shares(router, model, 20)).keys() == {fast.server_id}


async def test_the_first_server_of_a_model_joins_with_what_it_says(router: Router, model: str) -> None:
    first = liar_at(router, model, capacity_blocks=30)
    assert await first.join() == "0:30"
    await router.stub.ReportServer(pb.ReportServerRequest(model=model, server_id=first.server_id, slow=True))
    assert spans((await router.stub.PlanChain(pb.PlanChainRequest(model=model))).chain) == ["0:30"]


async def test_a_model_that_the_router_expects_is_not_taken_by_who_comes_first(redis_url: str, model: str) -> None:
    async with running_router(redis_url, models=f"{model}=30@f") as router:
        for facts, words in (
            ({"num_model_blocks": 1, "capacity_blocks": 1}, "30 blocks"),
            ({"fingerprint": "forged"}, "weights"),
        ):
            rogue = BlockServer(router, model, **facts)
            refused = await refusal(rogue.register())
            assert (refused.reason, words in refused.message) == ("SPAN_REFUSED", True)
            rogue.span.end = 1
            assert (await refusal(rogue.beat_in_full())).reason == "SPAN_REFUSED"
        assert (await refusal(BlockServer(router, f"not-{model}").register())).reason == "SPAN_REFUSED"
        assert await BlockServer(router, model, capacity_blocks=30).join() == "0:30"


async def test_a_model_may_be_expected_whatever_number_of_blocks_it_has(redis_url: str, model: str) -> None:
    async with running_router(redis_url, models=f"another=2,{model}") as router:
        assert (await refusal(BlockServer(router, f"not-{model}").register())).reason == "SPAN_REFUSED"
        assert await BlockServer(router, model, capacity_blocks=30).join() == "0:30"
        rogue = BlockServer(router, model, num_model_blocks=1, capacity_blocks=1)
        assert (await refusal(rogue.register())).reason == "SPAN_REFUSED"


async def test_servers_stay_while_a_release_goes_to_another_model(redis_url: str, model: str) -> None:
    async with running_router(redis_url, models=model) as old, running_router(redis_url, models="another=30") as new:
        server = BlockServer(old, model, capacity_blocks=30)
        await server.join()
        server.router = new
        await server.beat_in_full()
        assert (await refusal(BlockServer(new, model).register())).reason == "SPAN_REFUSED"
