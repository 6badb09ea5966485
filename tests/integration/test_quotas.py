"""Quotas of tenants over several client services: refusals name the quota, and no answer that has begun is cut off."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from corolla.chain.control import ControlPlane
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import QuotaExceeded
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.service import ClientBounds
from corolla.v1 import generation_pb2 as pb
from corolla.v1 import generation_pb2_grpc
from tests.integration.metrics import sample
from tests.integration.refusals import Refusal, key_metadata, refusal, refusal_of
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS: dict[str, dict[str, Any]] = {
    "hasty": {"requests_per_second": 3},
    "wide": {"running_sequences": 4},
    "long": {"running_requests": 1},
    "wordy": {"prompt_tokens_per_minute": 20},
    "spent": {"generated_tokens_per_minute": 30},
    "large": {"reserved_tokens": 100},
    "hoarding": {"stored_sessions": 2},
    "full": {"stored_session_bytes": 8300},
    "streaming": {"open_streams": 1},
    "slow": {"answer_seconds": 0.3},
    "discreet": {"withhold_cached_tokens": True},
}
LONG = 12_000


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}-0123456789"


swarm = tiny_swarm(
    ["0:5"],
    context_length=16384,
    keys="".join(f"{each}:{key_of(each)}\n" for each in (*LIMITS, "free")),
    quotas=LIMITS,
    num_clients=2,
    # All run in this process: one that is held up must not take a router that lives for one that does not.
    bounds=ClientBounds(quota_timeout_s=10.0),
    api_key=key_of("free"),
)


def asking(num_prompt_tokens: int = 3, max_tokens: int = 2, num_completions: int | None = None) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=range(1, 1 + num_prompt_tokens)),
        stopping=pb.StoppingParameters(max_tokens=max_tokens, ignore_eos=True),
        num_completions=num_completions,
    )


async def answer(swarm: Swarm, tenant: str, request: pb.GenerateRequest, client: int = 0) -> pb.GenerateResponse:
    async with open_channel(swarm.address_of(client)) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        response: pb.GenerateResponse = await stub.Generate(request, metadata=key_metadata(key_of(tenant)), timeout=60)
        return response


async def refused(
    swarm: Swarm, tenant: str, request: Any, client: int = 0, method: str = "Generate"
) -> tuple[str, float]:
    """The quota that a request does not fit in, and after how many seconds it is to be tried again."""
    async with open_channel(swarm.address_of(client)) as channel:
        refused = await refusal(channel, method, request, api_key=key_of(tenant), timeout_s=60)
    return quota_of(refused)


def quota_of(refused: Refusal) -> tuple[str, float]:
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.reason == "QUOTA_EXCEEDED"
    assert "QuotaFailure" in refused.details
    return refused.metadata["quota"], refused.retry_after_s


@asynccontextmanager
async def long_answer(
    swarm: Swarm, tenant: str, client: int = 0, num_completions: int | None = None
) -> AsyncIterator[None]:
    """An answer that has begun and goes on until its caller leaves."""
    async with open_channel(swarm.address_of(client)) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(
            asking(max_tokens=LONG, num_completions=num_completions), metadata=key_metadata(key_of(tenant))
        )
        await call.read()
        yield
        call.cancel()


async def test_cached_tokens_are_withheld_from_a_tenant_and_shared_all_the_same(swarm: Swarm) -> None:
    request = asking(130)
    for tenant, is_shown in (("free", True), ("discreet", False)):
        assert not (await answer(swarm, tenant, request)).usage.cached_tokens
        before = await sample(swarm.clients[0].metrics_port, "corolla_cached_prompt_tokens_total")
        async with open_channel(swarm.address_of(0)) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            metadata = key_metadata(key_of(tenant))
            session = (await stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)).session_id
            in_session = asking(130)
            in_session.session_id = session
            usages = [
                (await answer(swarm, tenant, request)).usage,
                [chunk.usage async for chunk in stub.GenerateStream(request, metadata=metadata)][-1],
                (await answer(swarm, tenant, in_session)).usage,
            ]
        assert [each.cached_tokens > 0 for each in usages] == [is_shown] * 3
        assert [each.prompt_tokens for each in usages] == [130] * 3
        shared = await sample(swarm.clients[0].metrics_port, "corolla_cached_prompt_tokens_total") - before
        assert shared >= 3 * 64


async def test_no_more_requests_begin_than_a_second_allows(swarm: Swarm) -> None:
    started_s = time.monotonic()
    outcomes = await asyncio.gather(
        *(answer(swarm, "hasty", asking(), number % 2) for number in range(40)), return_exceptions=True
    )
    most = 3 + 3 * (time.monotonic() - started_s)
    failures = [each for each in outcomes if isinstance(each, grpc.aio.AioRpcError)]
    assert len(outcomes) - len(failures) <= most
    assert len(outcomes) > len(failures) >= 1
    for each in failures:
        quota, wait_s = quota_of(refusal_of(each))
        assert quota == "requests_per_second"
        assert 0 < wait_s <= 1


@pytest.mark.parametrize(
    "method, request_",
    [("Tokenize", pb.TokenizeRequest(text="the thin man")), ("GetSession", pb.GetSessionRequest(session_id="0" * 32))],
)
async def test_a_text_tokenised_or_a_session_read_is_a_request(swarm: Swarm, method: str, request_: Any) -> None:
    async with open_channel(swarm.address) as channel:
        call = getattr(generation_pb2_grpc.GenerationServiceStub(channel), method)
        metadata = key_metadata(key_of("hasty"))
        outcomes = await asyncio.gather(
            *(call(request_, metadata=metadata, timeout=60) for _ in range(40)), return_exceptions=True
        )
    failures = [refusal_of(each) for each in outcomes if isinstance(each, grpc.aio.AioRpcError)]
    refusals = [each for each in failures if each.reason != "SESSION_NOT_FOUND"]
    assert refusals
    assert {quota_of(each)[0] for each in refusals} == {"requests_per_second"}


async def test_each_completion_is_a_sequence_wherever_it_runs(swarm: Swarm) -> None:
    async with long_answer(swarm, "wide", num_completions=3):
        assert await refused(swarm, "wide", asking(num_completions=2), client=1) == ("running_sequences", 1.0)
        assert len((await answer(swarm, "wide", asking(), client=1)).completions) == 1
    assert len((await answer(swarm, "wide", asking(num_completions=4), client=1)).completions) == 4


async def test_one_answer_after_the_other_is_never_two_at_a_time(swarm: Swarm) -> None:
    for number in range(12):
        await answer(swarm, "long", asking(), client=number % 2)


async def test_an_answer_whose_caller_left_no_longer_runs(swarm: Swarm) -> None:
    async with long_answer(swarm, "long", client=1):
        assert (await refused(swarm, "long", asking()))[0] == "running_requests"
    await answer(swarm, "long", asking())


async def test_prompts_flow_by_their_tokens(swarm: Swarm) -> None:
    await answer(swarm, "wordy", asking(num_prompt_tokens=15))
    quota, wait_s = await refused(swarm, "wordy", asking(num_prompt_tokens=15), client=1)
    assert quota == "prompt_tokens_per_minute"
    assert 0 < wait_s <= 30
    await answer(swarm, "wordy", asking(num_prompt_tokens=4), client=1)


async def test_an_answer_goes_on_and_the_next_one_waits(swarm: Swarm) -> None:
    answered = await answer(swarm, "spent", asking(max_tokens=90))
    assert len(answered.completions[0].token_ids) == 90

    async def is_refused() -> bool:
        try:
            quota, wait_s = await refused(swarm, "spent", asking(), client=1)
        except AssertionError:
            return False
        assert quota == "generated_tokens_per_minute"
        return wait_s > 60

    await until(is_refused)


async def test_a_running_answer_is_charged_before_its_end(swarm: Swarm) -> None:
    """Another tenant's limit, as a default: its answers are charged while they run."""
    folder = Path(swarm.clients[0].settings.quotas_file or "").parent
    file = folder / "running"
    file.write_text(json.dumps({"default": {"generated_tokens_per_minute": 50}}))
    service = await swarm.add_client(quotas_file=file)
    number = swarm.clients.index(service)

    async def is_refused() -> bool:
        try:
            return (await refused(swarm, "free", asking(), client=number))[0] == "generated_tokens_per_minute"
        except AssertionError:
            return False

    async with long_answer(swarm, "free", client=number):
        await until(is_refused)


async def test_no_more_tokens_are_reserved_than_allowed(swarm: Swarm) -> None:
    assert (await refused(swarm, "large", asking(max_tokens=98)))[0] == "reserved_tokens"
    assert (await refused(swarm, "large", asking(max_tokens=50, num_completions=2)))[0] == "reserved_tokens"
    await answer(swarm, "large", asking(max_tokens=97))


async def test_no_more_sessions_are_stored_than_allowed(swarm: Swarm) -> None:
    async with open_channel(swarm.address_of(0)) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        metadata = key_metadata(key_of("hoarding"))
        first = await stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)
        await stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)
        assert (await refused(swarm, "hoarding", pb.CreateSessionRequest(), 1, "CreateSession"))[0] == "stored_sessions"
        refusals = await sample(swarm.clients[1].metrics_port, "corolla_quota_refusals_total", quota="stored_sessions")
        assert refusals == 1
        await stub.DeleteSession(pb.DeleteSessionRequest(session_id=first.session_id), metadata=metadata)
        await stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)


async def test_who_has_stored_its_bytes_begins_no_turn(swarm: Swarm) -> None:
    metadata = key_metadata(key_of("full"))
    async with open_channel(swarm.address_of(0)) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        first, second = [
            (await stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)).session_id for _ in range(2)
        ]
        # There is room for one of the two, and then for no other session.
        one, other = asking(), asking()
        one.session_id, other.session_id = first, second
        for each in (one, other):
            each.tokens.ids[:] = [300] * 3000
        one.request_id = "one"
        answered = await answer(swarm, "full", one)
        for client in (0, 1):
            assert await refused(swarm, "full", other, client) == ("stored_session_bytes", 60)
            quota, _ = await refused(swarm, "full", pb.CreateSessionRequest(), client, "CreateSession")
            assert quota == "stored_session_bytes"
        # An answer that is there is given again.
        again = await answer(swarm, "full", one, client=1)
        assert again.completions[0].token_ids == answered.completions[0].token_ids
        refusals = await sample(
            swarm.clients[1].metrics_port, "corolla_quota_refusals_total", quota="stored_session_bytes"
        )
        assert refusals == 2
        await stub.DeleteSession(pb.DeleteSessionRequest(session_id=first), metadata=metadata)
        assert (await answer(swarm, "full", other)).completions


async def test_a_stream_is_open_until_its_answer_was_taken(swarm: Swarm) -> None:
    async with long_answer(swarm, "streaming", client=1):
        async with open_channel(swarm.address_of(0)) as channel:
            refused = await refusal(channel, "GenerateStream", asking(), api_key=key_of("streaming"), timeout_s=60)
        assert quota_of(refused) == ("open_streams", 1.0)
        # An answer that comes as a whole does not count as streaming.
        await answer(swarm, "streaming", asking())
    async with long_answer(swarm, "streaming", client=0):
        pass


async def test_an_answer_ends_when_its_seconds_are_over(swarm: Swarm) -> None:
    answered = await answer(swarm, "slow", asking(max_tokens=LONG))
    assert answered.completions[0].finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert len(answered.completions[0].token_ids) < LONG


@pytest.mark.full
async def test_a_changed_file_counts_and_one_that_makes_no_sense_does_not(swarm: Swarm, tmp_path: Path) -> None:
    file = tmp_path / "quotas"
    file.write_text("{}")
    service = await swarm.add_client(quotas_file=file)
    number = swarm.clients.index(service)
    await answer(swarm, "free", asking(), client=number)
    file.write_text(json.dumps({"tenants": {"free": {"reserved_tokens": 1}}}))

    async def is_refused() -> bool:
        try:
            return (await refused(swarm, "free", asking(), client=number))[0] == "reserved_tokens"
        except AssertionError:
            return False

    await until(is_refused)
    file.write_text("default: none")
    await asyncio.sleep(2.5)
    assert await is_refused()


async def test_without_redis_each_client_service_enforces_its_share(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "quotas"
    file.write_text(json.dumps({"default": {"running_requests": 2}}))
    async with Swarm(tmp_path, model, ["0:5"], num_clients=2, client={"quotas_file": file}, own_redis=True) as swarm:
        for client in (0, 1, 0):
            await answer(swarm, "free", asking(), client=client)
        await asyncio.to_thread(swarm.redis.stop)
        async with long_answer(swarm, "free", client=0):
            assert (await refused(swarm, "free", asking(), client=0))[0] == "running_requests"
            await answer(swarm, "free", asking(), client=1)
        await answer(swarm, "free", asking(), client=0)
        assert await sample(swarm.clients[0].metrics_port, "corolla_local_quota_takes_total") >= 2


@asynccontextmanager
async def enforcer(address: str, tmp_path: Path, lease_s: float = 60.0, **limits: int) -> AsyncIterator[QuotaEnforcer]:
    file = tmp_path / f"quotas-{'-'.join(limits)}"
    file.write_text(json.dumps({"default": limits}))
    enforcer = QuotaEnforcer(file, ClientMetrics(CollectorRegistry()), timeout_s=10, lease_s=lease_s)
    control = ControlPlane(address, f"model-{tmp_path.name}")
    enforcer.start(control)
    running = asyncio.create_task(enforcer.run())
    try:
        yield enforcer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await enforcer.settle()
        await control.close()


@pytest.mark.full
async def test_what_a_long_answer_holds_does_not_lapse(swarm: Swarm, tmp_path: Path) -> None:
    async with (
        enforcer(swarm.router_address, tmp_path, 5.0, running_requests=1) as one,
        enforcer(swarm.router_address, tmp_path, 5.0, running_requests=1) as other,
    ):
        async with one.running("t", 1, pb.Usage()):
            await asyncio.sleep(7)
            with pytest.raises(QuotaExceeded):
                async with other.running("t", 1, pb.Usage()):
                    pass
        async with other.running("t", 1, pb.Usage()):
            pass


async def test_requests_that_are_refused_ask_the_router_little(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        enforcer(swarm.router_address, tmp_path, requests_per_second=1) as hasty,
        enforcer(swarm.router_address, tmp_path, running_requests=1) as wide,
    ):
        num_takes = 0
        counted = ControlPlane.take_quotas

        async def count(self: ControlPlane, *given: Any) -> Any:
            nonlocal num_takes
            num_takes += 1
            return await counted(self, *given)

        monkeypatch.setattr(ControlPlane, "take_quotas", count)

        async def is_let_in(enforcer: QuotaEnforcer) -> bool:
            try:
                async with enforcer.running("t", 1, pb.Usage()):
                    await asyncio.sleep(0.5)
            except QuotaExceeded:
                return False
            return True

        started_s = time.monotonic()
        await is_let_in(hasty)
        await asyncio.gather(*(is_let_in(hasty) for _ in range(200)))
        assert num_takes < 220
        num_takes = 0
        for _ in range(200):
            await is_let_in(hasty)
        assert num_takes <= 20 + 10 * (time.monotonic() - started_s)
        num_takes = 0
        async with wide.running("t", 1, pb.Usage()):
            assert not any(await asyncio.gather(*(is_let_in(wide) for _ in range(100))))
        assert num_takes < 100 + 4 * 5 + 10


@pytest.mark.full
async def test_what_a_client_service_that_died_held_comes_back(swarm: Swarm, tmp_path: Path) -> None:
    async with enforcer(swarm.router_address, tmp_path, running_requests=1) as one:
        dead = QuotaEnforcer(
            tmp_path / "quotas-running_requests", ClientMetrics(CollectorRegistry()), timeout_s=10, lease_s=2.0
        )
        control = ControlPlane(swarm.router_address, f"model-{tmp_path.name}")
        dead.start(control)
        holding = dead.running("t", 1, pb.Usage())
        await holding.__aenter__()

        async def is_free() -> bool:
            try:
                async with one.running("t", 1, pb.Usage()):
                    return True
            except QuotaExceeded:
                return False

        assert not await is_free()
        await until(is_free)
        await control.close()


async def test_a_router_that_knows_no_quotas_is_one_that_is_away(tmp_path: Path) -> None:
    older = grpc.aio.server()
    port = older.add_insecure_port("127.0.0.1:0")
    await older.start()
    try:
        async with (
            enforcer(f"127.0.0.1:{port}", tmp_path, running_requests=1) as here,
            here.running("t", 1, pb.Usage()),
        ):
            with pytest.raises(QuotaExceeded, match="running_requests"):
                async with here.running("t", 1, pb.Usage()):
                    pass
    finally:
        await older.stop(None)
