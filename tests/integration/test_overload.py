"""More requests than the service takes: which run, which wait, which are refused, and that refusals leave nothing."""

import asyncio
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import QueueFull
from corolla.client.text.chat import ChatTemplate
from corolla.client.text.tokenizer import TextTokenizer
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import generation_pb2 as pb
from corolla.v1.common_pb2 import ChatMessage
from corolla.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.gates import held_up
from tests.integration.metrics import sample
from tests.integration.refusals import SERVICE, key_metadata, refusal, refusal_of
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until
from tests.tiers import quick

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {"ada": "key-of-ada-00001", "bob": "key-of-bob-00001"}
NUM_RUNNING = 3
NUM_WAITING = 3
NUM_TOKENS = 200
PROMPT = "the thin man"
MAX_BYTES = 1 << 20
CONTEXT_LENGTH = 8192
LONGEST_TEXT = "word " * (MAX_BYTES // 6)


swarm = tiny_swarm(
    ["0:2", "2:5"],
    # The context has more tokens than a block server has pages for.
    context_length=CONTEXT_LENGTH,
    keys="".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()),
    server={"kv_cache_mib": 1},
    client={
        "max_running_requests": NUM_RUNNING,
        "max_waiting_requests": NUM_WAITING,
        "max_request_bytes": MAX_BYTES,
        "max_reply_mib": 1,
        "max_held_request_bytes": 4 * MAX_BYTES,
    },
    api_key=KEYS["ada"],
)


class Visitors:
    """Requests that come all at once, and what became of them."""

    def __init__(self, swarm: Swarm) -> None:
        self.order: list[str] = []
        self.refused: Counter[str] = Counter()
        self._address = swarm.address

    async def visit(self, tenant: str) -> None:
        async with AsyncClient(self._address, api_key=KEYS[tenant]) as client:
            try:
                answer = await client.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
            except QueueFull:
                self.refused[tenant] += 1
                return
            assert len(answer.token_ids) == NUM_TOKENS
            self.order.append(tenant)


async def fill(swarm: Swarm, visitors: Visitors) -> list[asyncio.Task[None]]:
    """Sends as many of one tenant's requests as run and wait; to be called while none can end."""
    tasks = [asyncio.create_task(visitors.visit("ada")) for _ in range(NUM_RUNNING + NUM_WAITING)]

    await until(partial(is_held, swarm, NUM_RUNNING + NUM_WAITING))
    return tasks


async def is_held(swarm: Swarm, num_requests: int) -> bool:
    return await num_held(swarm) == num_requests


async def are_refused(visitors: Visitors, num_requests: int) -> bool:
    return visitors.refused.total() == num_requests


async def num_held(swarm: Swarm) -> float:
    """Requests that run or wait."""
    metrics_port = swarm.clients[0].metrics_port
    return sum([await sample(metrics_port, f"corolla_num_requests_{state}") for state in ("running", "waiting")])


async def test_client_service_serves_or_refuses_three_times_its_capacity(swarm: Swarm) -> None:
    visitors = Visitors(swarm)
    most_sessions = 0

    async def watch() -> None:
        nonlocal most_sessions
        while True:
            most_sessions = max(most_sessions, *(each.num_sessions for each in await swarm.statuses()))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(visitors.visit("ada") for _ in range(3 * (NUM_RUNNING + NUM_WAITING))))
    watching.cancel()
    # Answers are quick here, so some of the later ones may find room.
    assert len(visitors.order) >= NUM_RUNNING + NUM_WAITING
    assert visitors.refused["ada"] == 3 * (NUM_RUNNING + NUM_WAITING) - len(visitors.order) > 0
    assert 0 < most_sessions <= NUM_RUNNING, "who waits or is refused has no session on any hop"
    await swarm.until_empty()
    assert await sample(swarm.clients[0].metrics_port, "corolla_num_requests_waiting") == 0


def a_request(text: str = PROMPT, **stopping: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stopping=pb.StoppingParameters(**stopping))


TOO_MUCH: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str]] = {
    "more pages than there are": (
        a_request(max_tokens=CONTEXT_LENGTH // 2), grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_PAGES",
    ),
    "a text far beyond the context": (
        a_request(LONGEST_TEXT), grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED",
    ),
    "ids far beyond the context": (
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[40] * (MAX_BYTES // 2))),
        grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED",
    ),
    "a larger message than is taken": (
        a_request("word " * (MAX_BYTES // 5)), grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE",
    ),
}  # fmt: skip


def seconds_of_all_the_work(swarm: Swarm) -> float:
    """The time to tokenize the longest text that is refused, on this machine under its present load."""
    tokenizer = TextTokenizer.load(Path(swarm.clients[0].settings.model))
    started = time.monotonic()
    tokenizer.encode(LONGEST_TEXT)
    return time.monotonic() - started


@pytest.mark.parametrize("name", quick(TOO_MUCH, "more pages than there are", "a text far beyond the context"))
async def test_client_service_refuses_at_once_requests_beyond_model_or_servers(swarm: Swarm, name: str) -> None:
    request, code, reason = TOO_MUCH[name]
    visitors = Visitors(swarm)
    busy = [asyncio.create_task(visitors.visit("ada")) for _ in range(NUM_RUNNING - 1)]

    async def is_refused_at_once(channel: grpc.aio.Channel) -> bool:
        times_s: list[float] = []
        for _ in range(5):
            started = time.monotonic()
            refused = await refusal(channel, "GenerateStream", request, api_key=KEYS["ada"])
            times_s.append(time.monotonic() - started)
            assert (refused.code, refused.reason) == (code, reason)
            # Coming back helps only where room may be made.
            assert ("RetryInfo" in refused.details) == (reason == "OUT_OF_PAGES")
        return min(times_s) < await asyncio.to_thread(seconds_of_all_the_work, swarm) / 4

    async with open_channel(swarm.address) as channel:
        # Where all the work was done first, no measurement would say so, however busy the machine is.
        for _ in range(3):
            if await is_refused_at_once(channel):
                break
        else:
            pytest.fail("it was not refused at once")
    await asyncio.gather(*busy)
    assert len(visitors.order) == len(busy)
    await swarm.until_empty()


async def test_client_service_tokenizes_texts_one_by_one_in_a_thread_and_bounds_their_queue(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    spell, working, most_at_a_time = TextTokenizer.token_text, set[int](), 0
    may_go_on = threading.Event()

    def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
        nonlocal most_at_a_time
        may_go_on.wait(timeout=60)  # the queue is full however slowly calls arrive
        working.add(threading.get_ident())
        most_at_a_time = max(most_at_a_time, len(working))
        time.sleep(0.001)  # others have their chance
        try:
            return spell(tokenizer, token_id)
        finally:
            working.discard(threading.get_ident())

    monkeypatch.setattr(TextTokenizer, "token_text", token_text)
    request = pb.TokenizeRequest(text="\x00" * 50)
    async with open_channel(swarm.address) as channel:
        stub = GenerationServiceStub(channel)
        calls = [
            asyncio.ensure_future(stub.Tokenize(request, metadata=key_metadata(KEYS["ada"])))
            for _ in range(3 * NUM_WAITING)
        ]
        # Only a refused call ends while the first is held up.
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        may_go_on.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
    answers = [each for each in done if isinstance(each, pb.TokenizeResponse)]
    refused = [refusal_of(each) for each in done if isinstance(each, grpc.aio.AioRpcError)]
    assert len(answers) >= NUM_WAITING + 1
    assert all(len(each.tokens) == len(each.token_ids) >= 50 for each in answers)
    assert {each.reason for each in refused} == {"QUEUE_FULL"}
    assert most_at_a_time == 1
    assert await num_held(swarm) == 0


TO_COUNT = {
    "a text just beyond the context": "\x00" * (CONTEXT_LENGTH + 1),
    "a text far beyond the context": "word " * 40_000,
    "a conversation far beyond the context": [{"role": "user", "content": "word " * 40_000}],
}


@pytest.mark.parametrize("name", quick(TO_COUNT, "a text just beyond the context"))
async def test_a_text_beyond_the_context_is_counted(swarm: Swarm, name: str) -> None:
    given: Any = TO_COUNT[name]
    async with swarm.connect() as client:
        counted = await client.tokenize(given)
    tokenizer = TextTokenizer.load(Path(swarm.clients[0].settings.model))
    if isinstance(given, str):
        expected = tokenizer.encode(given)
    else:
        expected = ChatTemplate(tokenizer).prompt_ids([ChatMessage(**each) for each in given])
    assert len(counted) > CONTEXT_LENGTH
    assert list(counted.token_ids) == expected
    assert all(counted.pieces[i] == tokenizer.token_text(counted.token_ids[i]) for i in range(0, len(counted), 997))


async def test_texts_to_tokenize_are_no_waiting_requests(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count neither in the gauges nor in the queue of waiting requests."""
    begun, may_go_on = threading.Semaphore(0), threading.Event()
    spell = TextTokenizer.token_text

    def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
        begun.release()
        assert may_go_on.wait(30)
        return spell(tokenizer, token_id)

    monkeypatch.setattr(TextTokenizer, "token_text", token_text)
    async with swarm.connect() as client:
        texts = [asyncio.create_task(client.tokenize("\x00")) for _ in range(NUM_WAITING)]
        await asyncio.to_thread(begun.acquire)
        assert await num_held(swarm) == 0
        answer = await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
        assert not any(text.done() for text in texts)
        may_go_on.set()
        await asyncio.gather(*texts)


@pytest.mark.kind
async def test_a_turn_that_is_too_long_for_its_session_does_not_wait_to_be_refused(swarm: Swarm) -> None:
    async with swarm.connect() as client, client.session() as session, open_channel(swarm.address) as channel:
        await session.generate(PROMPT, max_tokens=16, ignore_eos=True)
        before = await session.info()
        # The prompt alone would fit.
        ids = pb.TokenIds(ids=[40] * (CONTEXT_LENGTH - before.num_tokens))
        request = pb.GenerateRequest(tokens=ids, session_id=before.session_id)
        visitors = Visitors(swarm)
        with held_up(swarm.servers[0]):
            tasks = [asyncio.create_task(visitors.visit("ada")) for _ in range(NUM_RUNNING)]
            await until(partial(is_held, swarm, NUM_RUNNING))
            for _ in range(3):
                refused = await refusal(channel, "GenerateStream", request, api_key=KEYS["ada"])
                assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
            assert not any(task.done() for task in tasks), "it waited for a place"
        await asyncio.gather(*tasks)
        after = await session.info()
        assert (after.num_tokens, after.num_turns, after.busy) == (before.num_tokens, 1, False)
    await swarm.until_empty()


@pytest.mark.kind
async def test_the_bytes_of_all_requests_are_bounded(swarm: Swarm) -> None:
    visitors = Visitors(swarm)
    # A field that the service does not know is carried along.
    padding = MAX_BYTES * 3 // 4
    tag_and_length = bytes([0xFA, 0x3F, *(padding >> shift & 0x7F | 0x80 for shift in (0, 7)), padding >> 14])
    large = a_request(max_tokens=4).SerializeToString() + tag_and_length + bytes(padding)
    echoing = pb.GenerateRequest(tokens=pb.TokenIds(ids=[40] * 1000), echo=True, logprobs=20)
    async with open_channel(swarm.address) as channel:
        untyped: Any = channel
        call = untyped.unary_unary(SERVICE + "Generate")
        with held_up(swarm.servers[0]):
            running = [asyncio.create_task(visitors.visit("ada")) for _ in range(NUM_RUNNING)]
            await until(partial(is_held, swarm, NUM_RUNNING))
            waiting = [asyncio.ensure_future(call(large, metadata=key_metadata(KEYS["ada"]))) for _ in range(2)]
            await until(partial(is_held, swarm, NUM_RUNNING + 2))
            # The second one is small, but its prompt takes much of the reply.
            for too_much in (large, echoing):
                refused = await refusal(channel, "Generate", too_much, api_key=KEYS["ada"])
                assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
                assert "of this tenant" in refused.message
            waiting.append(asyncio.ensure_future(call(large, metadata=key_metadata(KEYS["bob"]))))
            await until(partial(is_held, swarm, NUM_RUNNING + 3))
            assert not any(task.done() for task in running)
        await asyncio.gather(*running, *waiting)
        assert not visitors.refused
        # Once it is gone, there is room for another.
        await call(large, metadata=key_metadata(KEYS["ada"]))
    await swarm.until_empty()


async def failed(swarm: Swarm, fault: str) -> float:
    """Answers that the caller, or the service, is to blame for."""
    port, named = swarm.clients[0].metrics_port, {"code": "RESOURCE_EXHAUSTED", "fault": fault}
    return sum(
        [
            await sample(port, "corolla_rpcs_total", method=f"GenerationService/{each}", **named)
            for each in ("Generate", "GenerateStream")
        ]
    )


@pytest.mark.kind
async def test_a_flood_of_one_tenant_is_no_fault_of_the_service(swarm: Swarm) -> None:
    """Nor is a message that is too large: both would burn its error budget."""
    before = {fault: await failed(swarm, fault) for fault in ("caller", "service")}
    visitors = Visitors(swarm)
    with held_up(swarm.servers[0]):
        tasks = await fill(swarm, visitors)
        tasks += [asyncio.create_task(visitors.visit(tenant)) for tenant in KEYS]
        await until(partial(are_refused, visitors, 2))
    await asyncio.gather(*tasks)
    assert visitors.refused == {"ada": 2}
    async with open_channel(swarm.address) as channel:
        too_large, _, reason = TOO_MUCH["a larger message than is taken"]
        assert (await refusal(channel, "Generate", too_large, api_key=KEYS["ada"])).reason == reason
    after = {fault: await failed(swarm, fault) for fault in ("caller", "service")}
    assert after == {"caller": before["caller"] + 3, "service": before["service"]}
