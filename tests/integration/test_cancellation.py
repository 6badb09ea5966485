"""However a call ends, nothing stays behind: no session, no page, no task, no step that is waited for."""

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from corolla.chain.streams import DataPlane
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import SessionBusy
from corolla.client.transcripts import Transcripts
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import FinishReason
from corolla.v1 import generation_pb2 as pb
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.metrics import sample
from tests.integration.refusals import refusal_of
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CANCELLATIONS = 500
NUM_AT_A_TIME = 20
SHORTER_THAN_A_LOCK_S = 12
LONG_PROMPT = "the thin man in the inner tent " * 12
PROMPTS = ("the thin man", LONG_PROMPT)
STOPPING = pb.StoppingParameters(max_tokens=100, ignore_eos=True)

ENDINGS: Counter[str] = Counter()

Attempt = Callable[[Swarm, random.Random], Awaitable[None]]


# Small chunks, so that a long prompt is many steps.
swarm = tiny_swarm(["0:2", "2:5"], client={"prefill_chunk_tokens": 24})


@pytest_asyncio.fixture(loop_scope="module")
async def complaints() -> list[str]:
    """Unhandled failures that the event loop reported."""
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(str(context)))
    return heard


def moment_s(chance: random.Random) -> float:
    """A moment from before the first frame goes out to the middle of decoding."""
    return chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.8)))


async def end_early(method: Any, request: Message, chance: random.Random) -> None:
    """Calls, and cancels at a moment or lets a deadline do it; an answer that was quicker is fine."""
    num_chunks = 0
    by_deadline = chance.random() < 0.5
    call = method(request, timeout=moment_s(chance) if by_deadline else None)
    if not by_deadline:
        asyncio.get_running_loop().call_later(moment_s(chance), call.cancel)
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                num_chunks += 1
        else:
            await call
    if isinstance(call, grpc.aio.UnaryStreamCall):
        ENDINGS["in the answer" if num_chunks else "before the first token"] += 1


async def generate(swarm: Swarm, chance: random.Random) -> None:
    async with open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        request = pb.GenerateRequest(text=chance.choice(PROMPTS), stopping=STOPPING)
        await end_early(stub.Generate, request, chance)


async def generate_several(swarm: Swarm, chance: random.Random) -> None:
    async with open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        request = pb.GenerateRequest(text=chance.choice(PROMPTS), stopping=STOPPING, num_completions=3)
        await end_early(stub.GenerateStream, request, chance)


async def close_the_channel(swarm: Swarm, chance: random.Random) -> None:
    channel = open_channel(swarm.address)
    request = pb.GenerateRequest(text=chance.choice(PROMPTS), stopping=STOPPING, num_completions=2)
    call = GenerationServiceStub(channel).GenerateStream(request)

    async def read() -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(moment_s(chance))
    await channel.close(None)
    await reading


async def leave_a_turn(swarm: Swarm, chance: random.Random) -> None:
    """One or two turns of a conversation, each left early; then the session goes."""
    async with open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        session_id = (await stub.CreateSession(pb.CreateSessionRequest())).session_id
        for _ in range(chance.choice((1, 2))):
            message = pb.ChatMessage(role="user", content=chance.choice(PROMPTS))
            request = pb.ChatRequest(session_id=session_id, messages=[message], stopping=STOPPING)
            await end_early(stub.ChatStream, request, chance)
        async with swarm.connect() as client:
            await until_idle(client, session_id)
            await client.delete_session(session_id)


async def until_idle(client: AsyncClient, session_id: str) -> None:
    """Waits for the service to notice that the caller has left, and not for the lock to run out."""

    async def is_idle() -> bool:
        return not (await client.get_session(session_id)).busy

    await until(is_idle, timeout_s=SHORTER_THAN_A_LOCK_S)


def until_they_came_at_all_moments() -> Iterator[int]:
    """Seeds of the attempts. Where the machine is slow, few answers have begun when they are left: then more follow."""
    for seed in itertools.count():
        if seed >= NUM_CANCELLATIONS and min(ENDINGS["before the first token"], ENDINGS["in the answer"]) > 30:
            return
        yield seed


ATTEMPTS: tuple[Attempt, ...] = (generate, generate_several, close_the_channel, leave_a_turn)


def running_tasks() -> Counter[str]:
    return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks() if not task.done())


async def until_settled(swarm: Swarm, before: Counter[str]) -> None:
    """Waits until no server holds anything; fails with a list of the rest."""
    await swarm.until_empty()
    left: Any = None
    for _ in range(250):
        gc.collect()
        left = (running_tasks() - before, swarm.clients[0].num_pending)
        if not any(left):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"left behind: {left}")


async def gauges(swarm: Swarm) -> dict[str, float]:
    read = {}
    for number, server in enumerate(swarm.servers):
        read[f"sessions {number}"] = await sample(server.metrics_port, "corolla_hop_sessions")
        read[f"used pages {number}"] = await sample(server.metrics_port, "corolla_kv_pages", state="used")
        for kind in ("steps", "ring_rows"):
            read[f"waiting {kind} {number}"] = await sample(server.metrics_port, f"corolla_num_{kind}_waiting")
    for name in ("running", "waiting"):
        read[name] = await sample(swarm.clients[0].metrics_port, f"corolla_num_requests_{name}")
    return read


@pytest.mark.full
async def test_500_random_cancellations_leave_nothing(swarm: Swarm, complaints: list[str]) -> None:
    async with swarm.connect() as client:
        expected = (await client.generate(LONG_PROMPT, max_tokens=20)).token_ids
    await swarm.until_empty()
    before = running_tasks()
    seeds = until_they_came_at_all_moments()

    async def work() -> None:
        for seed in seeds:
            chance = random.Random(seed)
            await ATTEMPTS[seed % len(ATTEMPTS)](swarm, chance)

    async with asyncio.timeout(240), asyncio.TaskGroup() as workers:
        for _ in range(NUM_AT_A_TIME):
            workers.create_task(work())
    await until_settled(swarm, before)
    assert not complaints
    # Tokens came of sessions that were gone by then.
    assert await sample(swarm.clients[0].metrics_port, "corolla_discarded_tokens_total") > 0

    async def gauges_are_zero() -> bool:
        return not any((await gauges(swarm)).values())

    await until(gauges_are_zero)
    async with swarm.connect() as client:
        assert (await client.generate(LONG_PROMPT, max_tokens=20)).token_ids == expected


async def test_a_cancelled_turn_does_not_change_the_conversation(swarm: Swarm, complaints: list[str]) -> None:
    async with swarm.connect() as client, client.chat() as undisturbed, client.chat() as disturbed:
        for each in (undisturbed, disturbed):
            await each.send("the thin man", max_tokens=12, ignore_eos=True)
        session_id = await disturbed.open()
        held = await client.get_session(session_id)
        chance = random.Random(1)
        async with open_channel(swarm.address) as channel:
            stub = GenerationServiceStub(channel)
            for number in range(12):
                message = pb.ChatMessage(role="user", content=chance.choice(PROMPTS))
                request = pb.ChatRequest(session_id=session_id, messages=[message], stopping=STOPPING)
                call = stub.ChatStream(request, timeout=None if number % 2 else 0.05)
                await asyncio.sleep(number * 0.01)
                call.cancel()
                with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    await call.wait_for_connection()
                await until_idle(client, session_id)
        now = await client.get_session(session_id)
        assert (now.num_tokens, now.num_turns) == (held.num_tokens, held.num_turns)
        expected = await undisturbed.send("and then?", max_tokens=20, ignore_eos=True)
        got = await disturbed.send("and then?", max_tokens=20, ignore_eos=True)
        assert got.token_ids == expected.token_ids
        assert got.usage.cached_tokens == expected.usage.cached_tokens > 0
    await swarm.until_empty()
    assert not complaints


async def test_a_session_is_freed_at_once_when_its_first_turn_is_cancelled(swarm: Swarm) -> None:
    """The client service releases the lock with the caller at any moment, before the lock's time is over."""
    async with swarm.connect() as client, open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        for number in range(30):
            session_id = (await client.create_session()).session_id
            message = pb.ChatMessage(role="user", content="the thin man")
            call = stub.ChatStream(pb.ChatRequest(session_id=session_id, messages=[message], stopping=STOPPING))
            await asyncio.sleep(number * 0.0005)
            call.cancel()
            await until(partial(is_deleted, client, session_id), timeout_s=SHORTER_THAN_A_LOCK_S)
    await swarm.until_empty()


async def is_deleted(client: AsyncClient, session_id: str) -> bool:
    with suppress(SessionBusy):
        await client.delete_session(session_id)
        return True
    return False


@pytest.mark.parametrize("waits_for", [Transcripts.delete, DataPlane.connect], ids=["router", "hops"])
async def test_a_deleted_session_is_freed_although_its_caller_left(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, waits_for: Callable[..., Awaitable[Any]]
) -> None:
    """Its record is gone by then, so no caller could delete it again."""
    is_waiting, is_left = asyncio.Event(), asyncio.Event()
    owner = Transcripts if waits_for is Transcripts.delete else DataPlane

    async def held(*args: Any) -> Any:
        answer = await waits_for(*args)
        is_waiting.set()
        await is_left.wait()
        return answer

    async def num_left() -> float:
        ended = {"method": "GenerationService/DeleteSession", "code": "CANCELLED"}
        return await sample(swarm.clients[0].metrics_port, "corolla_rpcs_total", **ended)

    async def has_left() -> bool:
        return await num_left() > before

    before = await num_left()
    async with swarm.connect() as client, asyncio.timeout(30):
        session_id = (await client.create_session()).session_id
        await client.generate("the thin man", session=session_id, max_tokens=3)
        monkeypatch.setattr(owner, waits_for.__name__, held)
        deletion = asyncio.create_task(client.delete_session(session_id))
        await is_waiting.wait()
        deletion.cancel()
        await until(has_left)
        is_left.set()
    await swarm.until_empty()


async def test_a_deadline_is_an_error_and_frees_all_pages(swarm: Swarm) -> None:
    async with open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        request = pb.GenerateRequest(text=LONG_PROMPT, stopping=STOPPING, num_completions=2)

        async def stream() -> None:
            async for _ in stub.GenerateStream(request, timeout=0.1):
                pass

        for answering in (stub.Generate(request, timeout=0.1), stream()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answering
            assert refusal_of(caught.value).code is grpc.StatusCode.DEADLINE_EXCEEDED
    await swarm.until_empty()


async def test_a_time_limit_ends_the_answer_and_keeps_its_text(swarm: Swarm) -> None:
    async with swarm.connect() as client:
        whole = await client.generate("the thin man", max_tokens=400, ignore_eos=True)
        cut = await client.generate("the thin man", max_tokens=400, ignore_eos=True, time_limit_s=0.1)
    assert cut.finish_reason is FinishReason.TIME_LIMIT
    assert 0 < len(cut.token_ids) < 400
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert cut.text
    await swarm.until_empty()
