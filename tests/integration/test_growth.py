"""Answers without a limit go on to the end of the context, and reserve pages and quota only as they grow."""

import asyncio
from typing import Any

import pytest

from corolla.block_server.service import BlockServer
from corolla.chassis.errors import ContextLengthExceeded
from corolla.client.generation import answer_factory
from corolla.sdk.async_client import AsyncClient
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = {tenant: f"key-of-{tenant}-0123456789" for tenant in ("ada", "bob")}
CONTEXT = 560
PROMPT = [1, 2, 3]
FIRST = 256
QUOTA = 530
"""Tokens that `bob` may reserve: more than an answer reserves at first, and fewer than one may have."""


swarm = tiny_swarm(
    ["0:2", "2:5"], context_length=CONTEXT, keys="".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()),
    quotas={"bob": {"reserved_tokens": QUOTA}}, server={"kv_cache_mib": 4}, client={"max_running_requests": 64},
    api_key=KEYS["ada"],
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.full),
        pytest.param({"speculation": "prompt_lookup"}, marks=pytest.mark.full),
    ],
    ids=["greedy", "seeded", "drafts"],
)
async def test_an_answer_without_a_limit_is_that_with_the_rest_of_the_context(
    swarm: Swarm, options: dict[str, Any]
) -> None:
    async with swarm.connect() as client:
        limited = await client.generate(PROMPT, max_tokens=CONTEXT - len(PROMPT), ignore_eos=True, **options)
        free = await client.generate(PROMPT, ignore_eos=True, **options)
        assert len(free.token_ids) == CONTEXT - len(PROMPT)
        assert free.token_ids == limited.token_ids
        assert free.finish_reason == limited.finish_reason
        assert free.usage.recoveries == 0
    await swarm.until_empty()


@pytest.mark.full
async def test_a_turn_of_a_session_grows_too(swarm: Swarm) -> None:
    async with swarm.connect() as client, client.session() as session:
        first = await session.generate(PROMPT, ignore_eos=True, max_tokens=300)
        rest = await session.generate([4, 5], ignore_eos=True)
        assert len(PROMPT) + len(first.token_ids) + 2 + len(rest.token_ids) == CONTEXT
        expected = await client.generate([*PROMPT, *first.token_ids, 4, 5], ignore_eos=True)
        assert rest.token_ids == expected.token_ids


@pytest.mark.kind
async def test_a_limit_beyond_the_context_is_the_rest_of_the_context(swarm: Swarm) -> None:
    beyond: dict[str, Any] = {"ignore_eos": True, "max_tokens": 2**31 - 1}
    async with swarm.connect() as client, client.session() as session:
        expected = (await client.generate(PROMPT, ignore_eos=True)).token_ids
        answer = await client.generate(PROMPT, **beyond)
        assert (answer.token_ids, answer.finish_reason) == (expected, "length")
        streamed = [each async for each in client.stream(PROMPT, **beyond)]
        assert [token_id for chunk in streamed for token_id in chunk.token_ids] == list(expected)
        assert streamed[-1].finish_reason == "length"
        first = await session.generate(PROMPT, ignore_eos=True, max_tokens=500)
        rest = await session.generate([4, 5], **beyond)
        assert len(PROMPT) + len(first.token_ids) + 2 + len(rest.token_ids) == CONTEXT
        assert rest.finish_reason == "length"
        with pytest.raises(ContextLengthExceeded, match="context length is 560"):
            await session.generate([6], **beyond)
    await swarm.until_empty()


# The simulation has servers fail while answers grow, in each run.
@pytest.mark.full
async def test_an_answer_grows_on_a_chain_that_lost_a_server(swarm: Swarm) -> None:
    async with swarm.connect() as client:
        expected = (await client.generate(PROMPT, ignore_eos=True)).token_ids
        await swarm.add_server("2:5")
        victim: BlockServer | None = swarm.servers[1]
        await swarm.until_ready()
        found: list[int] = []
        async for chunk in client.stream(PROMPT, ignore_eos=True):
            found += chunk.token_ids
            if victim is not None and len(found) > FIRST // 2:
                await swarm.crash(victim)
                victim = None
        assert tuple(found) == tuple(expected)


async def test_answers_without_a_limit_do_not_refuse_callers_that_fit(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just as many answers begin as with a limit of 256. They all end, and none before it has as many tokens."""
    monkeypatch.setattr(answer_factory, "GROWTH_PATIENCE_S", 0.5)
    async with swarm.connect() as client:
        num_pages = min(each.num_pages for each in await swarm.statuses())
        num_layers = 3
        num_callers = num_pages // num_layers * 32 // (FIRST + 64)
        assert num_callers * CONTEXT > num_pages // num_layers * 32
        streams = [client.stream(PROMPT, ignore_eos=True) for _ in range(num_callers)]
        begun = []
        for stream in streams:
            chunks = aiter(stream)
            begun.append((chunks, list((await anext(chunks)).token_ids)))

        async def rest(chunks: Any, found: list[int]) -> int:
            async for chunk in chunks:
                found += chunk.token_ids
            return len(found)

        lengths = await asyncio.gather(*(rest(*each) for each in begun))
        assert min(lengths) >= FIRST
        assert max(lengths) == CONTEXT - len(PROMPT)
    await swarm.until_empty()


@pytest.mark.kind
async def test_an_answer_without_a_limit_ends_with_the_quota(swarm: Swarm) -> None:
    async with AsyncClient(swarm.address, api_key=KEYS["bob"]) as client:
        free = await client.generate(PROMPT, ignore_eos=True)
        assert FIRST < len(free.token_ids) <= QUOTA - len(PROMPT)
        assert free.finish_reason == "length"
        both = await asyncio.gather(*(client.generate(PROMPT, ignore_eos=True) for _ in range(2)))
        assert all(FIRST <= len(each.token_ids) <= QUOTA - len(PROMPT) for each in both)
    await swarm.until_empty()
