"""Requests with a common prefix: the hops compute the prefix once, and no token changes."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from pydantic import SecretStr

from corolla.chain.beginnings import Beginnings
from corolla.chassis.errors import InvalidRequest, OutOfPages
from corolla.planning import replicas
from corolla.sdk.async_client import AsyncClient
from corolla.wire.beginnings import unpack
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Unsplit
from tests.tiers import quick

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE_TOKENS = 32
NUM_NEW = 24
GREEDY: dict[str, Any] = {"max_tokens": NUM_NEW, "ignore_eos": True}
ALICE, BOB = "key-of-alice-0001", "key-of-bob-00001"


@dataclass(frozen=True, slots=True)
class Stack:
    """A swarm, and the unsplit model with the expected answers."""

    swarm: Swarm
    unsplit: Unsplit

    def truth(self, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
        return self.unsplit.generate(prompt, num_new, ignore_eos=True).token_ids

    async def tokens_computed(self) -> list[float]:
        return [await sample(server.metrics_port, "corolla_hop_tokens_total") for server in self.swarm.servers]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=quick(["llama", "gemma3_text"], "llama"))
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """All layers see everything in one family; in the other most see the last 12 tokens only."""
    folder: Path = tmp_path_factory.mktemp("prefixes")
    changes = {"max_position_embeddings": 1024}
    model = make_tiny_checkpoint(request.param, folder / request.param, config_changes=changes)
    keys = folder / "keys.txt"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    async with Swarm(
        folder, model, ["0:2", "2:5"], server={"page_tokens": PAGE_TOKENS, "kv_cache_mib": 4, "host_cache_mib": 12},
        client={"api_keys_file": keys}, api_key=ALICE,
    ) as swarm:  # fmt: skip
        yield Stack(swarm, Unsplit(model))


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with stack.swarm.connect() as client:
        yield client
    await stack.swarm.until_empty()


def some_tokens(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 256), k=num_tokens)


async def test_requests_share_a_prefix_only_where_their_salts_are_the_same(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(6 * PAGE_TOKENS + 5, 77)
    cached = [
        (await client.generate(prompt, cache_salt=salt, **GREEDY)).usage.cached_tokens // PAGE_TOKENS
        for salt in ("one", "other", None, "one", "other", None)
    ]
    assert cached == [0, 0, 0, 6, 6, 6]
    with pytest.raises(InvalidRequest, match="cache_salt"):
        await client.generate(prompt, cache_salt="x" * 257, **GREEDY)


async def test_a_conversation_shares_its_turns_only_with_its_salt(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(2 * PAGE_TOKENS, 78)
    async with client.session() as session:
        answers = [await session.generate(text, cache_salt="s", **GREEDY) for text in (prompt, prompt[:PAGE_TOKENS])]
    log = [*prompt, *answers[0].token_ids, *prompt[:PAGE_TOKENS], *answers[1].token_ids]
    num_whole = len(log) // PAGE_TOKENS
    for salt, num_pages in (("t", 0), (None, 0), ("s", num_whole)):
        again = await client.generate([*log, 5, 6], cache_salt=salt, **GREEDY)
        assert abs(again.usage.cached_tokens // PAGE_TOKENS - num_pages) <= (1 if num_pages else 0)


async def test_the_second_request_with_a_long_prefix_computes_only_new_tokens(
    stack: Stack, client: AsyncClient
) -> None:
    prefix = some_tokens(512, seed=1)
    for number, tail in enumerate((some_tokens(20, seed=2), some_tokens(9, seed=3), [])):
        prompt = prefix + tail
        num_cached = 0 if number == 0 else 512 if tail else 512 - PAGE_TOKENS
        before = await stack.tokens_computed()
        answer = await client.generate(prompt, **GREEDY)
        after = await stack.tokens_computed()
        assert answer.token_ids == tuple(stack.truth(prompt))
        assert answer.usage.cached_tokens == num_cached
        num_computed = len(prompt) - num_cached + NUM_NEW - 1
        assert [new - old for new, old in zip(after, before, strict=True)] == [num_computed] * 2
    await stack.swarm.until_empty()
    assert all(status.num_cached_pages >= 512 // PAGE_TOKENS for status in await stack.swarm.statuses())


async def test_prefix_cache_queries_and_hits_are_counted(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(3 * PAGE_TOKENS + 5, seed=4)

    server = stack.swarm.servers[0]
    pool = server.engine.sessions.pool
    expected = [pool.num_prefix_tokens_asked + 6 * PAGE_TOKENS, pool.num_prefix_tokens_found + 3 * PAGE_TOKENS]
    await client.generate(prompt, **GREEDY)
    await client.generate(prompt, **GREEDY)

    async def are_counted() -> bool:
        names = [f"corolla_prefix_cache_{name}_total" for name in ("queries", "hits")]
        return [await sample(server.metrics_port, name) for name in names] == expected

    await until(are_counted)


async def test_tenants_share_nothing(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(200, seed=5)
    await client.generate(prompt, **GREEDY)
    assert (await client.generate(prompt, **GREEDY)).usage.cached_tokens == 6 * PAGE_TOKENS
    async with AsyncClient(stack.swarm.address, api_key=BOB) as bob:
        assert (await bob.generate(prompt, **GREEDY)).usage.cached_tokens == 0
        assert (await bob.generate(prompt, **GREEDY)).usage.cached_tokens == 6 * PAGE_TOKENS


async def test_equal_prompts_at_the_same_time(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(150, seed=6)
    answers = await asyncio.gather(*(client.generate(prompt, **GREEDY) for _ in range(5)))
    again = await client.generate(prompt, n=3, **GREEDY)
    truth = tuple(stack.truth(prompt))
    assert [answer.token_ids for answer in answers] == [truth] * 5
    assert [each.token_ids for each in again.completions] == [truth] * 3
    assert again.usage.cached_tokens == 4 * PAGE_TOKENS


async def test_cached_pages_in_use_are_not_evicted(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(300, seed=7)
    await client.generate(prompt, **GREEDY)
    stream = client.stream(prompt, max_tokens=300, ignore_eos=True)
    async with stream:
        chunks = aiter(stream)
        first = await anext(chunks)
        token_ids = list(first.token_ids)
        for round_number in range(3):
            others = [some_tokens(600, seed=100 * round_number + number) for number in range(6)]
            answers = await asyncio.gather(
                *(client.generate(other, max_tokens=8, ignore_eos=True) for other in others), return_exceptions=True
            )
            for other, answer in zip(others, answers, strict=True):
                assert isinstance(answer, OutOfPages) or answer.token_ids == tuple(stack.truth(other, 8))  # type: ignore[union-attr]
            assert any(not isinstance(answer, BaseException) for answer in answers)
        async for chunk in chunks:
            token_ids += chunk.token_ids
    assert token_ids == stack.truth(prompt, 300)
    assert (await client.generate(prompt, **GREEDY)).token_ids == tuple(stack.truth(prompt))


async def test_an_evicted_text_comes_back_from_the_memory_of_the_machine(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(600, seed=9)
    await client.generate(prompt, **GREEDY)
    num_pages = max(status.num_pages for status in await stack.swarm.statuses())
    for number in range(num_pages * PAGE_TOKENS // 1000 + 1):
        await client.generate(some_tokens(1000, seed=900 + number), max_tokens=1, ignore_eos=True)
    longer = prompt + some_tokens(40, seed=10)
    before = await stack.tokens_computed()
    answer = await client.generate(longer, **GREEDY)
    after = await stack.tokens_computed()
    assert answer.token_ids == tuple(stack.truth(longer))
    num_cached = 600 // PAGE_TOKENS * PAGE_TOKENS
    assert answer.usage.cached_tokens == num_cached
    num_computed = len(longer) - num_cached + NUM_NEW - 1
    assert [new - old for new, old in zip(after, before, strict=True)] == [num_computed] * 2
    for server in stack.swarm.servers:
        assert await sample(server.metrics_port, "corolla_host_cache_hits_total") >= PAGE_TOKENS


async def test_a_cancelled_prompt_leaves_only_valid_cached_pages(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(700, seed=8)
    for seconds in (0.0, 0.01, 0.03, 0.1):
        call = asyncio.create_task(client.generate(prompt, **GREEDY))
        await asyncio.sleep(seconds)
        call.cancel()
        with suppress(asyncio.CancelledError, grpc.RpcError):
            await call
    await stack.swarm.until_empty()
    assert (await client.generate(prompt, **GREEDY)).token_ids == tuple(stack.truth(prompt))


@pytest.mark.parametrize("speculation, seed", [("off", 100), ("prompt_lookup", 200)])
async def test_a_request_with_the_whole_conversation_reuses_the_answers_pages(
    stack: Stack, client: AsyncClient, speculation: str, seed: int
) -> None:
    """Also where hops held rejected draft tokens meanwhile: the cache only has tokens of the final text."""
    log = some_tokens(100, seed) * 2
    for turn in range(3):
        before = await stack.tokens_computed()
        answer = await client.generate(log, max_tokens=70, ignore_eos=True, speculation=speculation)
        after = await stack.tokens_computed()
        assert answer.token_ids == tuple(stack.truth(log, 70))
        # The answer's last token was never processed.
        num_cached = (len(log) - 10 - 1) // PAGE_TOKENS * PAGE_TOKENS if turn else answer.usage.cached_tokens
        assert answer.usage.cached_tokens == num_cached
        if speculation == "off":
            num_computed = len(log) - num_cached + 70 - 1
            assert [new - old for new, old in zip(after, before, strict=True)] == [num_computed] * 2
        log += [*answer.token_ids, *some_tokens(10, seed + 1 + turn)]


async def test_a_cancelled_answer_leaves_only_valid_cached_pages(stack: Stack, client: AsyncClient) -> None:
    prompt = some_tokens(90, seed=17)
    truth = stack.truth(prompt, 200)
    async with client.stream(prompt, max_tokens=200, ignore_eos=True) as stream:
        chunks = aiter(stream)
        for _ in range(60):
            await anext(chunks)
    await stack.swarm.until_empty()
    log = prompt + truth[:120]
    answer = await client.generate(log, max_tokens=80, ignore_eos=True)
    assert answer.token_ids == tuple(truth[120:])
    assert answer.usage.cached_tokens >= (90 + 59) // PAGE_TOKENS * PAGE_TOKENS


def announced_by(swarm: Swarm) -> set[tuple[str, int]]:
    """The beginnings of texts that servers announce."""
    tables = [(server.server_id, server.engine.sessions) for server in swarm.servers]
    return {(server_id, each) for server_id, table in tables for each in unpack(table.announced.newest_first())}


async def test_a_conversation_that_is_sent_again_meets_its_pages_among_replicas(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers without sessions take turns, each with the whole of its conversation.

    They go on at another client service, which learns from heartbeats what servers hold.
    """
    # Pages outweigh the times of steps, which a busy machine makes.
    monkeypatch.setattr(replicas, "ANSWER_TOKENS", 1e-6)
    heard, hear = dict[Beginnings, set[tuple[str, int]]](), Beginnings.hear

    def listen(beginnings: Beginnings, server_id: str, announced: bytes) -> None:
        hear(beginnings, server_id, announced)
        heard.setdefault(beginnings, set()).update((server_id, each) for each in unpack(announced))

    monkeypatch.setattr(Beginnings, "hear", listen)
    async with Swarm(
        tmp_path, model, ["0:2", "2:5"] * 3, num_clients=2, server={"page_tokens": PAGE_TOKENS},
        client={"cache_secret": SecretStr("a secret of many characters, at least 32")},
        router={"load_push_interval_s": 0.1},
    ) as swarm, swarm.connect(0) as client, swarm.connect(1) as other_client:  # fmt: skip
        talks = [some_tokens(4 * PAGE_TOKENS, seed) for seed in range(6)]
        num_cached = num_held = 0
        for turn in range(3):
            held = list(map(len, talks))
            if turn == 2:
                client = other_client
                await swarm.until_empty()
                await until(lambda: len(heard) == 2 and all(announced_by(swarm) <= each for each in heard.values()))
            answers = await asyncio.gather(*(client.generate(talk, **GREEDY) for talk in talks))
            for number, answer in enumerate(answers):
                if turn:
                    num_cached += answer.usage.cached_tokens
                    num_held += (held[number] - PAGE_TOKENS) // PAGE_TOKENS * PAGE_TOKENS
                talks[number] = [*talks[number], *answer.token_ids, *some_tokens(PAGE_TOKENS - NUM_NEW, turn)]
        assert num_cached >= 0.9 * num_held
        await swarm.until_empty()
