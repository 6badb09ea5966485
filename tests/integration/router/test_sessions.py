"""Session records: owners, turns and their locks, expiry, the count."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from corolla.chassis.errors import StoreUnavailable
from corolla.chassis.status import from_rpc_error
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.v1.common_pb2 import ChatMessage
from tests.embedded_redis import EmbeddedRedis
from tests.integration.router.conftest import BlockServer, Router, StartRouter, refusal


class Session:
    def __init__(self, router: Router, model: str, tenant: str = "t") -> None:
        self.router = router
        self.stub = router.stub
        self.model = model
        self.tenant = tenant
        self.session_id = secrets.token_hex(16)

    def record(self, **facts: Any) -> pb.SessionRecord:
        return pb.SessionRecord(session_id=self.session_id, tenant=self.tenant, model=self.model, **facts)

    async def create(self, ttl_ms: int = 60_000, max_tenant_bytes: int = 0, **facts: Any) -> Any:
        return await self._call("CreateSessionRecord", pb.CreateSessionRecordRequest(
            record=self.record(**facts), ttl_ms=ttl_ms, max_tenant_bytes=max_tenant_bytes))  # fmt: skip

    async def get(self) -> Any:
        return await self._call("GetSessionRecord", self._named(pb.GetSessionRecordRequest, tenant=self.tenant))

    async def begin(
        self, turn_id: str, lock_ms: int = 10_000, max_tenant_bytes: int = 0, num_new_bytes: int = 0
    ) -> Any:
        request = self._named(
            pb.BeginTurnRequest, tenant=self.tenant, turn_id=turn_id, lock_ms=lock_ms,
            max_tenant_bytes=max_tenant_bytes, num_new_bytes=num_new_bytes,
        )  # fmt: skip
        return await self._call("BeginTurn", request)

    async def renew(self, turn_id: str, lock_ms: int = 10_000) -> None:
        await self._call("RenewTurn", self._named(pb.RenewTurnRequest, turn_id=turn_id, lock_ms=lock_ms))

    async def end(self, turn_id: str, *, discard: bool = False, ttl_ms: int = 60_000, **facts: Any) -> None:
        await self._call("EndTurn", pb.EndTurnRequest(
            record=self.record(**facts), turn_id=turn_id, ttl_ms=ttl_ms, discard=discard))  # fmt: skip

    async def move(self, hop: common_pb2.Hop) -> None:
        """Moves the session from the server of `CHAIN` to another hop."""
        await self._call("MoveSession", self._named(
            pb.MoveSessionRequest, tenant=self.tenant, server_id=CHAIN.hops[0].server_id, hop=hop))  # fmt: skip

    async def delete(self) -> Any:
        return await self._call("DeleteSessionRecord", self._named(pb.DeleteSessionRecordRequest, tenant=self.tenant))

    async def count(self) -> int:
        answer = await self._call("CountSessionRecords", pb.CountSessionRecordsRequest(model=self.model))
        return int(answer.num_sessions)

    def _named(self, request_class: Any, **facts: Any) -> Any:
        return request_class(model=self.model, session_id=self.session_id, **facts)

    async def _call(self, method: str, request: Any) -> Any:
        return await getattr(self.stub, method)(request, timeout=30)


async def test_a_tenant_has_so_many_sessions_and_no_more(start_router: StartRouter, model: str) -> None:
    """Whichever router it asks; others are not kept from theirs."""
    routers = [await start_router(max_tenant_sessions=3) for _ in range(2)]
    sessions = [Session(routers[number % 2], model, "greedy") for number in range(4)]
    for each in sessions[:3]:
        await each.create()
    await sessions[0].create()  # the same call again
    refused = await refusal(sessions[3].create())
    assert refused.reason == "QUOTA_EXCEEDED"
    await Session(routers[0], model, "modest").create()
    await sessions[1].delete()
    await sessions[3].create()


@pytest.fixture
def session(router: Router, model: str) -> Session:
    return Session(router, model)


CHAIN = common_pb2.Chain(
    hops=[common_pb2.Hop(server_id="s", address="a:1", span=common_pb2.BlockSpan(start=0, end=30))], fingerprint="f"
)
TURN: dict[str, Any] = {
    "chain": CHAIN,
    "position": 4,
    "token_log": [1, 2, 3, 49151, 0],
    "transcript": [ChatMessage(role="user", content="grüß dich")],
    "num_turns": 1,
}


LARGE: dict[str, Any] = {"transcript": [ChatMessage(role="user", content="x" * 5000)]}


async def is_over(session: Session, turn_id: str = "", most: int = 5000) -> bool:
    """Whether the tenant has so much stored that a turn of this session does not begin."""
    turn_id = turn_id or secrets.token_hex(8)
    try:
        await session.begin(turn_id, max_tenant_bytes=most)
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        assert (refused.reason, refused.metadata) == ("QUOTA_EXCEEDED", {"quota": "stored_session_bytes"})
        assert refused.retry_after_s == 60
        return True
    await session.end(turn_id, discard=True)
    return False


async def test_a_tenant_that_has_stored_its_bytes_begins_nothing_more(start_router: StartRouter, model: str) -> None:
    """Whichever router it asks; what it has is written, read and deleted all the same."""
    routers = [await start_router() for _ in range(2)]
    full, small = (Session(router, model, "wordy") for router in routers)
    for each in (full, small):
        await each.create(max_tenant_bytes=5000)
    await full.begin("turn", max_tenant_bytes=5000)
    assert not await is_over(small)
    await full.end("turn", **LARGE)
    await full.end("turn", **LARGE)  # the same call again
    assert await is_over(small)
    assert await is_over(full)
    assert (await refusal(Session(routers[0], model, "wordy").create(max_tenant_bytes=5000))).reason == "QUOTA_EXCEEDED"
    assert not await is_over(small, most=12_000), "it counts once"
    await Session(routers[1], model, "other").create(max_tenant_bytes=5000)
    assert (await full.get()).transcript
    await full.delete()
    assert not await is_over(small)


async def test_no_tenant_fills_the_room_of_all_and_all_leave_room_for_the_rest(
    start_router: StartRouter, own_redis: EmbeddedRedis, model: str
) -> None:
    """The router's own bounds hold, and turns that run at once count what they may add, so that none exceeds them."""
    router = await start_router(
        redis_url=own_redis.url, redis_timeout_ms=5000, max_tenant_session_mib=2, max_session_mib=3
    )
    text: dict[str, Any] = {"transcript": [ChatMessage(role="user", content="x" * 900_000)]}

    async def started(tenant: str, count: int) -> list[Session]:
        sessions = [Session(router, model, tenant) for _ in range(count)]
        for each in sessions:
            await each.create()
        return sessions

    first, second, third = await started("greedy", 3)
    for each in (first, second):
        await each.begin("turn", num_new_bytes=900_000)
    refused = await refusal(third.begin("turn", num_new_bytes=900_000))
    assert (refused.reason, refused.metadata) == ("QUOTA_EXCEEDED", {"quota": "stored_session_bytes"})
    await second.end("turn", discard=True)
    await third.begin("turn", num_new_bytes=900_000)
    for each in (first, third):
        await each.end("turn", **text)
    (other,) = await started("other", 1)
    await other.begin("turn", num_new_bytes=900_000)
    await other.end("turn", **text)
    (late,) = await started("late", 1)
    full = await refusal(late.begin("turn", num_new_bytes=900_000))
    assert isinstance(full, StoreUnavailable)
    assert "of all tenants" in full.message
    await late.begin("small", num_new_bytes=1000)
    await first.delete()
    async with Redis.from_url(own_redis.url) as redis:
        deleted = [key async for key in redis.scan_iter(match="*:deleted:*")]
        assert sum([await redis.memory_usage(key) or 0 for key in deleted]) < 1000, "the text is not kept"
    await late.end("small", discard=True)
    await late.begin("turn", num_new_bytes=900_000)


async def test_bytes_are_those_of_the_record_as_it_is_now(session: Session) -> None:
    await session.create(**LARGE)
    assert await is_over(session)
    await session.begin("turn")
    await session.end("turn")
    assert not await is_over(session)


async def test_a_turn_that_was_written_is_read_again_by_a_tenant_that_is_over(session: Session) -> None:
    await session.create()
    await session.begin("named.1", max_tenant_bytes=5000)
    await session.end("named.1", **LARGE)
    for number in range(2, 4):
        assert not await is_over(session, f"named.{number}")
    assert await is_over(session, "other.1")
    # One that was not written began for nothing.
    assert await is_over(session, "other.2")


async def test_a_record_comes_back_as_it_was_written(session: Session) -> None:
    created = await session.create()
    assert (created.busy, 59_000 < created.expires_in_ms <= 60_000) == (False, True)
    await session.begin("turn-1")
    assert (await session.get()).busy
    await session.end("turn-1", ttl_ms=120_000, **TURN)
    read = await session.get()
    assert 60_000 < read.expires_in_ms <= 120_000
    assert read.store_id
    read.expires_in_ms, read.store_id = 0, ""
    assert read == session.record(epoch=1, **TURN)


async def test_each_turn_has_an_epoch_of_its_own(session: Session) -> None:
    assert (await session.create(epoch=7)).epoch == 0
    assert (await session.begin("one")).epoch == 1
    # The same turn again, as after a lost answer, is the same turn.
    assert (await session.begin("one")).epoch == 1
    await session.end("one", epoch=9)
    assert (await session.begin("lost", lock_ms=50)).epoch == 2
    await asyncio.sleep(0.1)
    assert (await session.begin("next")).epoch == 3


async def test_of_two_turns_at_once_one_gets_the_session(start_router: StartRouter, model: str) -> None:
    routers = [await start_router() for _ in range(2)]
    session = Session(routers[0], model)
    await session.create()
    rival = Session(routers[1], model)
    rival.session_id = session.session_id
    for attempt in range(10):
        answers = await asyncio.gather(session.begin(f"a{attempt}"), rival.begin(f"b{attempt}"), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(refused) == 1
        error = await refusal(_raise(refused[0]))
        assert (error.reason, error.retry_after_s) == ("SESSION_BUSY", 1.0)
        holder = "b" if answers[0] is refused[0] else "a"
        await session.end(f"{holder}{attempt}", discard=True)


async def _raise(failure: BaseException) -> None:
    raise failure


async def test_a_turn_of_the_same_name_takes_the_lock_over(session: Session) -> None:
    await session.create()
    assert (await session.begin("name.first")).epoch == 1
    assert (await refusal(session.begin("other.first"))).reason == "SESSION_BUSY"
    assert (await refusal(session.begin("name-too"))).reason == "SESSION_BUSY"
    assert (await session.begin("name.second")).epoch == 2
    for late in (session.end("name.first", num_turns=9), session.renew("name.first"), session.end("name.first")):
        assert (await refusal(late)).reason == "SESSION_BUSY"
    await session.end("name.second", num_turns=1)
    assert (await session.get()).num_turns == 1
    # A session that is free again does not remember the name: this is a turn like any other.
    assert (await session.begin("name.first")).epoch == 3


async def test_only_the_holder_ends_a_turn(session: Session) -> None:
    await session.create()
    await session.begin("one")
    assert (await refusal(session.end("two", position=0, num_turns=9))).reason == "SESSION_BUSY"
    assert (await refusal(session.renew("two"))).reason == "SESSION_BUSY"
    await session.renew("one")
    await session.end("one", num_turns=1)
    assert (await session.get()).num_turns == 1
    # Said twice, as after a lost answer, it is still done once; what another turn says changes nothing.
    await session.end("one", num_turns=1)
    assert (await refusal(session.end("two", num_turns=9))).reason == "SESSION_BUSY"
    assert (await session.get()).num_turns == 1


async def test_a_discarded_turn_changes_nothing(session: Session) -> None:
    await session.create(num_turns=5)
    await session.begin("turn")
    await session.end("turn", discard=True, num_turns=6)
    read = await session.get()
    assert (read.num_turns, read.busy) == (5, False)


async def test_unknown_foreign_and_expired_sessions_look_the_same(router: Router, model: str) -> None:
    unknown, expired, mine = (Session(router, model) for _ in range(3))
    await expired.create(ttl_ms=50)
    await mine.create()
    foreign = Session(router, model, tenant="other")
    foreign.session_id = mine.session_id
    await asyncio.sleep(0.1)
    for session in (unknown, expired, foreign):
        for call in (session.get(), session.begin("turn"), session.end("turn"), session.delete()):
            error = await refusal(call)
            assert (error.reason, error.message) == ("SESSION_NOT_FOUND", "there is no such session")
    await mine.begin("turn")
    assert (await refusal(foreign.delete())).reason == "SESSION_NOT_FOUND"


async def test_a_move_whose_first_answer_is_lost_is_no_error(
    router: Router, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to the store asks a second time by itself."""
    await session.create(**TURN)
    hop = await a_hop(session)
    monkeypatch.setattr(AsyncScript, "__call__", twice(AsyncScript.__call__))
    await session.move(hop)
    assert list((await session.get()).chain.hops) == [hop]


async def test_a_session_moves_only_to_a_server_that_is_placed(session: Session) -> None:
    """Client services connect to what a record names."""
    await session.create(**TURN)
    hop = await a_hop(session)
    elsewhere = common_pb2.Hop(server_id=hop.server_id, address="192.0.2.1:50052", span=hop.span)
    of_nobody = common_pb2.Hop(server_id="nobody", address=hop.address, span=hop.span)
    for forged in (elsewhere, of_nobody):
        assert (await refusal(session.move(forged))).reason == "ROUTE_UNKNOWN"
    assert (await session.get()).chain == CHAIN


async def a_hop(session: Session) -> common_pb2.Hop:
    """A hop on a server that could take the session over from the one that has it."""
    server = BlockServer(session.router, session.model, capacity_blocks=30)
    span = CHAIN.hops[0].span
    await server.register(f"{span.start}:{span.end}")
    return common_pb2.Hop(server_id=server.server_id, address=server.description.address, span=span)


async def test_delete_gives_the_record_and_not_during_a_turn(session: Session) -> None:
    await session.create(chain=CHAIN)
    await session.begin("turn")
    assert (await refusal(session.delete())).reason == "SESSION_BUSY"
    await session.end("turn", chain=CHAIN)
    assert (await session.delete()).chain == CHAIN
    assert (await refusal(session.get())).reason == "SESSION_NOT_FOUND"
    assert await session.count() == 0


async def test_a_deletion_whose_first_answer_is_lost_still_gives_the_record(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first deletion returns the record with the chain to free; a second one finds no session."""
    await session.create(**TURN)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncScript, "__call__", twice(AsyncScript.__call__))
        assert (await session.delete()).chain == CHAIN
    assert (await refusal(session.delete())).reason == "SESSION_NOT_FOUND"
    assert await session.count() == 0


def twice(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Calls as a connection to the store does that loses the first answer and asks again."""

    async def call_twice(*args: Any, **arguments: Any) -> Any:
        await call(*args, **arguments)
        return await call(*args, **arguments)

    return call_twice


async def test_an_id_is_created_once(session: Session) -> None:
    await session.create(num_turns=1)
    await session.create(num_turns=1)
    assert (await refusal(session.create(num_turns=2))).reason == "INVALID_REQUEST"


async def expired_sessions_do_not_count_unless_a_turn_keeps_them(router: Router, model: str) -> None:
    idle, busy = Session(router, model, "idle"), Session(router, model, "busy")
    for each in (idle, busy):
        await each.create(ttl_ms=SHORT_MS)
        assert (await refusal(Session(router, model, each.tenant).create())).reason == "QUOTA_EXCEEDED"
    await busy.begin("turn")
    await until_over()
    await Session(router, model, idle.tenant).create()
    assert (await refusal(Session(router, model, busy.tenant).create())).reason == "QUOTA_EXCEEDED"


async def bytes_of_expired_sessions_do_not_count(router: Router, model: str) -> None:
    sessions = [Session(router, model) for _ in range(2)]
    await sessions[1].create()
    await sessions[0].create(ttl_ms=SHORT_MS, **LARGE)
    assert await is_over(sessions[1])
    await until_over()
    assert not await is_over(sessions[1])
    # They do not count after their removal from the store, either.
    await Session(router, model).create()
    assert not await is_over(sessions[1])
    assert await is_over(sessions[1], most=50)


async def a_lock_runs_out_and_the_late_turn_writes_nothing(router: Router, model: str) -> None:
    session = Session(router, model)
    await session.create()
    await session.begin("late", lock_ms=SHORT_MS)
    assert (await refusal(session.begin("next"))).reason == "SESSION_BUSY"
    await until_over()
    await session.begin("next")
    assert (await refusal(session.end("late", num_turns=7))).reason == "SESSION_BUSY"
    await session.end("next", num_turns=1)
    assert (await session.get()).num_turns == 1


async def a_renewed_turn_keeps_lock_and_session(router: Router, model: str) -> None:
    session = Session(router, model)
    await session.create(ttl_ms=SHORT_MS)
    await session.begin("long", lock_ms=SHORT_MS)
    for _ in range(2):
        await session.renew("long", lock_ms=SHORT_MS)
        await session.renew("long", lock_ms=60_000)
    await until_over()
    assert (await refusal(session.begin("other"))).reason == "SESSION_BUSY"
    assert await session.count() == 1
    await session.end("long", num_turns=1)


async def the_count_follows_creation_expiry_and_deletion(router: Router, model: str) -> None:
    sessions = [Session(router, model) for _ in range(6)]
    for index, each in enumerate(sessions):
        await each.create(ttl_ms=SHORT_MS if index < 2 else 60_000)
    assert await sessions[0].count() == 6
    await sessions[5].delete()
    await until_over()
    assert await sessions[0].count() == 3


# Longer than a machine may pause between two calls.
SHORT_MS = 4000


async def until_over() -> None:
    await asyncio.sleep(SHORT_MS / 1000 + 0.1)


async def test_what_has_a_time_runs_out_with_it(start_router: StartRouter, model: str) -> None:
    """Each of these waits for that time; they wait together."""
    limited, router = await start_router(max_tenant_sessions=1), await start_router()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(expired_sessions_do_not_count_unless_a_turn_keeps_them(limited, f"{model}-1"))
        tasks.create_task(bytes_of_expired_sessions_do_not_count(router, f"{model}-2"))
        tasks.create_task(a_lock_runs_out_and_the_late_turn_writes_nothing(router, f"{model}-3"))
        tasks.create_task(a_renewed_turn_keeps_lock_and_session(router, f"{model}-4"))
        tasks.create_task(the_count_follows_creation_expiry_and_deletion(router, f"{model}-5"))
