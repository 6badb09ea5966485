"""What becomes of leases, placement and turns when Redis is frozen, flushed, full, or was away with all routers."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
import uvloop
from redis.asyncio import Connection, Redis

from corolla.chassis.errors import SessionNotFound, StoreUnavailable
from corolla.chassis.metrics import new_registry
from corolla.router.metrics import RouterMetrics
from corolla.router.registry import Registry
from corolla.router.store import Store
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from tests.embedded_redis import EmbeddedRedis
from tests.integration.router.conftest import BlockServer, Router, StartRouter, refusal, spans
from tests.integration.router.test_registration import placement, plan
from tests.integration.router.test_sessions import Session
from tests.integration.router.test_watch import metrics
from tests.integration.waiting import until

LEASE_S = 1.5
SHORT_LEASE = {"lease_ms": round(1000 * LEASE_S)}


@asynccontextmanager
async def full(redis: EmbeddedRedis) -> AsyncIterator[None]:
    client = Redis.from_url(redis.url)
    try:
        await client.config_set("maxmemory", "100kb")  # an empty one takes more
        with pytest.raises(Exception, match="maxmemory"):
            await client.set("one-more", "x" * 100)
        yield
        await client.config_set("maxmemory", "0")
    finally:
        await client.aclose()


async def flush(redis: EmbeddedRedis) -> None:
    client = Redis.from_url(redis.url)
    await client.flushall()
    await client.aclose()


async def names(router: Router, model: str) -> set[str]:
    return {each.server.server_id for each in (await placement(router, model)).servers}


async def until_empty(router: Router, model: str) -> None:
    """Until all leases have run out."""

    async def is_empty() -> bool:
        return await names(router, model) == set()

    await until(is_empty)


async def test_a_heartbeat_describes_its_own_server(router: Router, model: str) -> None:
    server, other = BlockServer(router, model), BlockServer(router, model)
    await server.join()
    for described, span in ((other.description, (0, 10)), (server.description, (5, 5))):
        request = pb.HeartbeatRequest(
            model=model, server_id=server.server_id, state=pb.SERVER_STATE_READY, server=described
        )
        request.span.start, request.span.end = span
        assert (await refusal(router.stub.Heartbeat(request, timeout=30))).reason == "INVALID_REQUEST"


async def test_silence_does_not_count_while_redis_is_frozen(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url, **SHORT_LEASE)
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    with own_redis.frozen():
        await asyncio.sleep(2 * LEASE_S)
        started = time.monotonic()
        error = await refusal(plan(router, model))
        assert isinstance(error, StoreUnavailable)
        assert error.retry_after_s
        for _ in range(100):
            assert isinstance(await refusal(plan(router, model)), StoreUnavailable)
        # Each of them would wait for two time-outs of 250 ms if there were no breaker.
        assert time.monotonic() - started < 100 * 0.5 / 2
    async with asyncio.timeout(30):
        while True:
            try:
                listed = await names(router, model)
                break
            except Exception:
                await asyncio.sleep(0.05)
    assert listed == {server.server_id}
    # The store counts again afterwards.
    await until_empty(router, model)


async def test_silence_does_not_count_while_no_router_listens(redis_url: str, start_router: StartRouter) -> None:
    model = f"model-{secrets.token_hex(6)}"
    first = await start_router(redis_url=redis_url, **SHORT_LEASE)
    server = BlockServer(first, model, capacity_blocks=30)
    await server.join()
    await first.process.stop()
    await asyncio.sleep(2 * LEASE_S)
    second = await start_router(redis_url=redis_url, **SHORT_LEASE)
    assert await names(second, model) == {server.server_id}
    assert spans((await plan(second, model)).chain) == ["0:30"]
    await until_empty(second, model)


async def test_a_router_with_a_full_store_plans_chains_and_refuses_writes_as_unavailable(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url, **SHORT_LEASE)
    server = BlockServer(router, model, capacity_blocks=30)
    await server.join()
    session = Session(router, model)
    await session.create()
    async with full(own_redis):
        await asyncio.sleep(2 * LEASE_S)
        assert spans((await plan(router, model)).chain) == ["0:30"]
        for call in (server.beat_in_full(), session.begin("turn"), Session(router, model).create()):
            error = await refusal(call)
            assert isinstance(error, StoreUnavailable)
            assert "no memory left" in error.message
            assert error.retry_after_s
        assert (await session.get()).session_id == session.session_id
        assert "corolla_store_up 0.0" in await metrics(router), "who reads is answered, and that is not enough"

    async def is_back() -> bool:
        await server.beat_in_full()
        return "corolla_store_up 1.0" in await metrics(router)

    await until(is_back)
    await session.begin("turn")
    assert await names(router, model) == {server.server_id}


@asynccontextmanager
async def a_name(ports: list[int]) -> AsyncIterator[int]:
    """A port that leads each new connection to the first of `ports`, as a name does whose address changes."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", ports[0])
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    server = await asyncio.start_server(lead, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_router_finds_the_primary_that_takes_the_place_of_a_demoted_one(
    start_router: StartRouter, own_redis: EmbeddedRedis, tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers keep the demoted one's connections busy, and it answers them; only writes tell that it was demoted."""
    caplog.set_level("INFO", "corolla.router.store")
    other = EmbeddedRedis.start(tmp_path / "other")
    ports = [own_redis.port]
    try:
        async with a_name(ports) as port:
            router = await start_router(redis_url=f"redis://127.0.0.1:{port}/0")
            server = BlockServer(router, model, capacity_blocks=30)
            await server.join()
            session = Session(router, model)
            await session.create()
            await asyncio.gather(*(session.get() for _ in range(8)))
            async with Redis.from_url(own_redis.url) as old, Redis.from_url(other.url) as new:
                await new.slaveof("127.0.0.1", own_redis.port)

                async def is_copied() -> bool:
                    return bool(await new.dbsize() == await old.dbsize() > 0)

                await until(is_copied)
                await new.slaveof()
                await old.slaveof("127.0.0.1", other.port)
            for turn in ("1", "2", "3"):
                refused = await refusal(session.begin(turn))
                assert isinstance(refused, StoreUnavailable)
                await asyncio.gather(*(session.get() for _ in range(8)), return_exceptions=True)
            ports[0] = other.port

            async def is_written() -> bool:
                try:
                    await session.begin("4")
                except grpc.aio.AioRpcError:
                    return False
                return True

            await until(is_written)
            await asyncio.gather(*(session.begin("4") for _ in range(8)))

            async def is_back() -> bool:
                await session.get()
                return "corolla_store_up 1.0" in await metrics(router)

            await until(is_back)
            said = [each.message for each in caplog.records if each.name == "corolla.router.store"]
            assert said == ["redis does not answer, or refuses calls; retrying", "redis is back"]
    finally:
        other.stop()


async def test_a_turn_brings_back_the_session_that_the_store_lost_meanwhile(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url)
    session = Session(router, model)
    await session.create()
    record = await session.begin("turn-1")
    await flush(own_redis)
    assert isinstance(await refusal(session.get()), SessionNotFound)
    written = {"epoch": record.epoch, "store_id": record.store_id, "token_log": [1, 2], "position": 2}
    for _ in range(2):  # the first answer may be lost
        await session.end("turn-1", **written)
    assert list((await session.get()).token_log) == [1, 2]
    assert (await session.begin("turn-2")).epoch == record.epoch + 1
    assert await session.count() == 1


async def test_a_deleted_session_stays_deleted(router: Router, model: str) -> None:
    session = Session(router, model)
    await session.create()
    record = await session.begin("turn-1", lock_ms=20)
    await asyncio.sleep(0.05)
    await session.delete()
    late = session.end("turn-1", epoch=record.epoch, store_id=record.store_id, token_log=[1])
    assert isinstance(await refusal(late), SessionNotFound)


async def test_a_turn_survives_a_lock_that_expired_without_another_turn(router: Router, model: str) -> None:
    session = Session(router, model)
    await session.create()
    first = await session.begin("turn-1", lock_ms=20)
    await asyncio.sleep(0.05)
    await session.end("turn-1", epoch=first.epoch, store_id=first.store_id, token_log=[1])
    second = await session.begin("turn-2", lock_ms=20)
    await asyncio.sleep(0.05)
    await session.begin("turn-3")
    error = await refusal(session.end("turn-2", epoch=second.epoch, store_id=second.store_id, token_log=[2]))
    assert error.reason == "SESSION_BUSY"
    assert list((await session.get()).token_log) == [1]


def test_a_connection_that_is_reset_just_before_it_is_written_to(
    redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop that routers run on reports such a connection with an error of its own."""
    num_resets = 0

    async def reset(connection: Connection) -> None:
        nonlocal num_resets
        if num_resets:
            num_resets -= 1
            assert connection._writer is not None
            connection._writer.transport.abort()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Connection, "check_health", reset)

    async def call() -> None:
        nonlocal num_resets
        store = Store(redis_url, 1.0, RouterMetrics(new_registry()))
        registry = Registry(store, lease_ms=600)
        roster = await registry.snapshot(model)
        num_resets = 1
        await registry.snapshot(model)
        assert num_resets == 0
        for waits in (registry.snapshot(model), registry.wait_for_change(roster, 0.1)):
            num_resets = 100
            with pytest.raises(StoreUnavailable):
                await waits
        num_resets = 0
        await registry.snapshot(model)
        await store.close()

    uvloop.run(call())


async def test_a_short_silence_is_not_reported(
    own_redis: EmbeddedRedis, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that is merely busy looks like a silent Redis for a moment."""
    caplog.set_level("INFO", "corolla.router.store")
    store = Store(own_redis.url, 0.05, RouterMetrics(new_registry()), silence_s=0.5)
    registry = Registry(store, lease_ms=600)

    async def answers() -> bool:
        with contextlib.suppress(StoreUnavailable):
            await registry.snapshot(model)
            return True
        return False

    await until(answers)
    with own_redis.frozen():
        assert not await answers()
    await until(answers)
    assert caplog.messages == []
    with own_redis.frozen():
        until_s = time.monotonic() + 30
        while not caplog.messages and time.monotonic() < until_s:
            assert not await answers()
            await asyncio.sleep(0.05)
    await until(answers)
    assert caplog.messages == ["redis does not answer, or refuses calls; retrying", "redis is back"]
    await store.close()


class Door:
    """Leads to a Redis, which gets no call that has the word `unheard`.

    Attributes:
        are_open: the numbers of the connections that clients have not ended; these are counted from 1.
    """

    unheard: ClassVar[str] = "unheard"

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_connections = 0
        self.are_open: set[int] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Yields an address of Redis that leads through the door."""
        async with await asyncio.start_server(self._lead, "127.0.0.1", 0) as server:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        self.are_open.add(number)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        answering = asyncio.create_task(self._answer(far_reader, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.unheard.encode() not in data:
                    far_writer.write(data)
        self.are_open.remove(number)
        answering.cancel()
        far_writer.close()
        writer.close()

    async def _answer(self, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await far_reader.read(1 << 16):
            writer.write(data)


async def test_a_call_without_an_answer_costs_only_its_own_connection_while_redis_answers(
    own_redis: EmbeddedRedis,
) -> None:
    door = Door(own_redis.port)
    async with door.opened() as url:
        store = Store(url, 0.5, RouterMetrics(new_registry()))
        await asyncio.gather(*(store.models() for _ in range(8)))
        before = set(door.are_open)
        assert len(before) == 8
        slow = asyncio.create_task(store.remember_model(Door.unheard))
        while not slow.done():
            await store.models()
            await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailable):
            await slow

        async def is_tried() -> bool:
            """The call was made again on a connection of its own, and one more tells that Redis answers."""
            return door.num_connections == 10 and 10 not in door.are_open

        await until(is_tried)
        await asyncio.gather(*(store.models() for _ in range(8)))
        assert len(door.are_open) == 8
        assert len(before & door.are_open) == 7
        with own_redis.frozen():
            with pytest.raises(StoreUnavailable):
                await store.models()

            async def are_ended() -> bool:
                return not before & door.are_open

            await until(are_ended)
        await store.close()


async def test_a_bug_is_not_reported_as_an_outage(redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(redis_url, 1.0, RouterMetrics(new_registry()))
    registry = Registry(store, lease_ms=600)
    await registry.snapshot(model)

    async def fail(connection: Connection) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "check_health", fail)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="dictionary changed size"):
                await registry.snapshot(model)
    # The breaker has not opened.
    await registry.snapshot(model)
    await store.close()


async def test_adapters_can_be_taken_out_while_redis_is_full(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    router = await start_router(redis_url=own_redis.url)
    await BlockServer(router, model, capacity_blocks=30).join()
    adapter = pb.RegisteredAdapter(version=common_pb2.AdapterVersion(name="legal", digest="0" * 64), source="/adapters")
    await router.stub.AddAdapter(pb.AddAdapterRequest(model=model, adapter=adapter))
    async with full(own_redis):
        await router.stub.RemoveAdapter(pb.RemoveAdapterRequest(model=model, name="legal"))
    after = await router.stub.GetPlacement(pb.GetPlacementRequest(model=model))
    assert not after.adapters
    assert list(after.removed_adapters) == [adapter.version]
