"""Routers in this process, over a real Redis, called through gRPC."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import CorollaError
from corolla.chassis.settings import load
from corolla.chassis.status import from_rpc_error
from corolla.router import store
from corolla.router.intervals import RouterIntervals
from corolla.router.service import RouterProcess
from corolla.router.settings import RouterSettings
from corolla.v1 import common_pb2, router_pb2_grpc
from corolla.v1 import router_pb2 as pb
from tests.embedded_redis import EmbeddedRedis

FAST = {
    "host": "127.0.0.1", "port": 0, "metrics_host": "127.0.0.1", "lease_ms": 60_000, "load_push_interval_s": 0.3,
    "grace_s": 0.5,
}  # fmt: skip
FAST_INTERVALS = RouterIntervals(relist_s=0.1, read_whole_s=0.15, settle_s=0.1, between_moves_s=0.5)


CLOCK = "set-clock:"
"""Before the name of a model: the key that holds its time in milliseconds, where a test sets the clock."""


@dataclass
class Router:
    """A running router, and a stub to it."""

    process: RouterProcess
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return router_pb2_grpc.RouterServiceStub(self.channel)


@asynccontextmanager
async def running_router(
    redis_url: str, *, intervals: RouterIntervals = FAST_INTERVALS, **overrides: Any
) -> AsyncIterator[Router]:
    settings = load(RouterSettings, **{**FAST, "redis_url": redis_url, **overrides})
    process = RouterProcess(settings, intervals=intervals)
    channel = open_channel(f"127.0.0.1:{process.port}")
    try:
        await process.start()
        yield Router(process, channel)
    finally:
        await channel.close()
        await process.stop()


StartRouter = Callable[..., Coroutine[Any, Any, Router]]


@pytest.fixture
async def start_router(redis_url: str) -> AsyncIterator[StartRouter]:
    """Starts routers on the shared Redis, or on `redis_url=...`; they stop with the test."""
    async with AsyncExitStack() as stack:

        async def start(**overrides: Any) -> Router:
            url = overrides.pop("redis_url", None)
            if url is None:
                # No test freezes this Redis: where it is silent for half a second, the machine was.
                url = redis_url
                overrides.setdefault("redis_timeout_ms", 5000)
            return await stack.enter_async_context(running_router(url, **overrides))

        yield start


@pytest.fixture
async def router(start_router: StartRouter) -> Router:
    return await start_router()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis that the test may freeze and end."""
    server = EmbeddedRedis.start(tmp_path)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def model() -> str:
    return f"model-{secrets.token_hex(6)}"


@pytest.fixture
def scripts_on_a_set_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts run as they are, save that their time is a key."""
    text = store.script_text

    def on_the_tests_clock(name: str) -> str:
        """`TIME` answers seconds and microseconds."""
        script = text(name)
        assert "redis.call('TIME')" in script
        read = f"tonumber(redis.call('GET', '{CLOCK}' .. string.match(KEYS[1], '{{(.*)}}')))"
        split = f"(function(ms) return {{tostring(math.floor(ms / 1000)), tostring(ms % 1000 * 1000)}} end)({read})"
        return script.replace("redis.call('TIME')", split)

    monkeypatch.setattr(store, "script_text", on_the_tests_clock)


class Clock:
    """The store's clock for a model, which stands until the test moves it."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._key = CLOCK + model

    async def move(self, ms: int) -> None:
        await self._redis.incrby(self._key, ms)


@pytest.fixture
async def clock(scripts_on_a_set_clock: None, redis_url: str, model: str) -> AsyncIterator[Clock]:
    async with Redis.from_url(redis_url) as redis:
        clock = Clock(redis, model)
        await clock.move(1_700_000_000_000)
        yield clock


class BlockServer:
    """A block server as the router sees it."""

    def __init__(self, router: Router, model: str, **facts: Any) -> None:
        self.router = router
        identity = secrets.token_hex(16)
        described: dict[str, Any] = {
            "server_id": identity, "address": f"{identity[:12]}:1", "model": model, "fingerprint": "f",
            "num_model_blocks": 30, "capacity_blocks": 10, "decode_tokens_per_second": 100.0,
        }  # fmt: skip
        self.description = pb.ServerDescription(**{**described, **facts})
        self.state: pb.ServerState.ValueType = pb.SERVER_STATE_READY
        self.span = common_pb2.BlockSpan()
        self.load = pb.ServerLoad(num_pages=100, num_free_pages=100, max_session_tokens=1600)

    @property
    def server_id(self) -> str:
        return self.description.server_id

    async def register(self, span: str | None = None) -> str:
        request = pb.RegisterServerRequest(server=self.description)
        if span is not None:
            start, end = span.split(":")
            request.span.CopyFrom(common_pb2.BlockSpan(start=int(start), end=int(end)))
        answer = await self.router.stub.RegisterServer(request, timeout=30)
        self.span = answer.span
        return f"{answer.span.start}:{answer.span.end}"

    async def leave(self) -> None:
        request = pb.DeregisterServerRequest(model=self.description.model, server_id=self.server_id)
        await self.router.stub.DeregisterServer(request, timeout=30)

    async def beat(self) -> None:
        request = pb.HeartbeatRequest(
            model=self.description.model, server_id=self.server_id, state=self.state, load=self.load
        )
        await self.router.stub.Heartbeat(request, timeout=30)

    async def beat_in_full(self) -> pb.HeartbeatResponse:
        """Sends a heartbeat as a real server does: with all that the router needs to register it again."""
        request = pb.HeartbeatRequest(
            model=self.description.model, server_id=self.server_id, state=self.state, load=self.load,
            server=self.description, span=self.span,
        )  # fmt: skip
        answer: pb.HeartbeatResponse = await self.router.stub.Heartbeat(request, timeout=30)
        return answer

    async def join(self, span: str | None = None) -> str:
        """Registers and is ready."""
        given = await self.register(span)
        await self.beat()
        return given

    @asynccontextmanager
    async def beating(self, interval_s: float = 0.1) -> AsyncIterator[None]:
        async def keep() -> None:
            while True:
                try:
                    await self.beat()
                except grpc.aio.AioRpcError as failure:
                    if from_rpc_error(failure).reason == "LEASE_LOST":
                        await self.register()
                        continue
                await asyncio.sleep(interval_s)

        task = asyncio.create_task(keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def refusal(call: Awaitable[Any]) -> CorollaError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def spans(chain: common_pb2.Chain) -> list[str]:
    return [f"{hop.span.start}:{hop.span.end}" for hop in chain.hops]
