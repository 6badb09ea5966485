"""Conversations: what their turns process, and what happens when hops have forgotten them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import SessionBusy
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import FinishReason, Reply
from corolla.v1 import generation_pb2 as pb
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.refusals import refusal
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURNS = ("the thin man", "and then in the inner tent?", "who are the others?")
GREEDY: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


# One mebibyte is some forty pages on the larger hop.
# What other sessions computed must not help: here it counts what a session's own hops hold.
swarm = tiny_swarm(["0:2", "2:5"], server={"kv_cache_mib": 1, "prefix_cache": False})


@pytest_asyncio.fixture(loop_scope="module")
async def client(swarm: Swarm) -> AsyncIterator[AsyncClient]:
    async with swarm.connect() as client:
        yield client
    await swarm.until_empty()


async def tokens_computed(swarm: Swarm) -> list[float]:
    return [await sample(server.metrics_port, "corolla_hop_tokens_total") for server in swarm.servers]


async def converse(client: AsyncClient, **options: Any) -> list[Reply]:
    async with client.chat() as chat:
        return [await chat.send(text, **{**GREEDY, **options}) for text in TURNS]


async def test_a_turn_processes_only_new_tokens(swarm: Swarm, client: AsyncClient) -> None:
    async with client.session() as text, client.chat() as chat:
        for is_text in (True, False):
            held = prompted = 0
            for prompt in TURNS:
                before = await tokens_computed(swarm)
                usage = (await (text.generate if is_text else chat.send)(prompt, **GREEDY)).usage
                after = await tokens_computed(swarm)
                if is_text:
                    # The last token of an answer was sampled, not processed.
                    assert usage.cached_tokens == max(0, held - 1)
                else:
                    # A random model answers with tokens that its own text does not give back: those may go.
                    assert min(prompted, held - 1) <= usage.cached_tokens <= max(0, held - 1)
                new = usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1
                assert [now - then for now, then in zip(after, before, strict=True)] == [new, new]
                prompted, held = usage.prompt_tokens, usage.prompt_tokens + usage.completion_tokens
            info = await (text if is_text else chat).info()
            assert (info.num_tokens, info.num_turns, info.busy) == (held, len(TURNS), False)
            assert 0 < info.expires_in_s <= 1800


@pytest.mark.parametrize("forgetful", [[0], [1], [0, 1]], ids=["first hop", "last hop", "both hops"])
async def test_a_hop_whose_cache_is_gone_is_filled_again_from_the_token_log(
    swarm: Swarm, client: AsyncClient, forgetful: list[int]
) -> None:
    expected = await converse(client)
    recomputed = await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total")
    got = []
    async with client.chat() as chat:
        for number, text in enumerate(TURNS):
            if number == 2:
                for hop in forgetful:
                    await swarm.forget(hop)
            got.append(await chat.send(text, **GREEDY))
    assert [reply.token_ids for reply in got] == [reply.token_ids for reply in expected]
    assert [reply.usage.cached_tokens > 0 for reply in got] == [False, True, False]
    lost = await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total") - recomputed
    assert lost == expected[2].usage.cached_tokens


async def test_a_stop_sequence_takes_tokens_back_behind_a_small_window(tmp_path: Path) -> None:
    """Hops are ahead of their reader when it finds the sequence, by more than the window and a frame together."""
    model = make_tiny_checkpoint("gemma3_text", tmp_path / "tiny")
    small: dict[str, Any] = {"server": {"prefix_cache": False}, "max_tokens_per_frame": 8}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], **small) as swarm, swarm.connect() as client:
        whole = await client.generate(TURNS[0], max_tokens=160, ignore_eos=True)
        stop = whole.text[len(whole.text) // 3 :][:6]
        async with client.session() as session:
            for prompt in (TURNS[0], TURNS[1]):
                held = (await session.info()).num_tokens
                answer = await session.generate(prompt, max_tokens=160, ignore_eos=True, stop=[stop])
                assert answer.usage.cached_tokens == max(0, held - 1)
                assert held or answer.finish_reason is FinishReason.STOP_SEQUENCE
        assert await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total") == 0


async def test_a_hop_that_was_replaced_between_turns_is_filled_again(swarm: Swarm, client: AsyncClient) -> None:
    expected = await converse(client)
    async with client.chat() as chat:
        got = [await chat.send(text, **GREEDY) for text in TURNS[:2]]
        await swarm.servers.pop(1).stop()
        await swarm.add_server("2:5")
        await swarm.until_ready()
        got.append(await chat.send(TURNS[2], **GREEDY))
    assert [reply.token_ids for reply in got] == [reply.token_ids for reply in expected]
    assert got[2].usage.cached_tokens == 0


async def test_where_redis_lost_turns_the_session_is_busy_until_its_epochs_are_new_again(
    swarm: Swarm, client: AsyncClient
) -> None:
    async with client.chat() as chat:
        expected = [await chat.send(text, **GREEDY) for text in (TURNS[0], TURNS[2])]
    async with client.chat() as chat, Redis.from_url(swarm.redis_url) as redis:
        await chat.send(TURNS[0], **GREEDY)
        (key,) = [key async for key in redis.scan_iter(f"*session:{await chat.open()}")]
        record = await redis.dump(key)
        assert record is not None
        for text in TURNS[1:]:
            await chat.send(text, **GREEDY)
        await redis.restore(key, 60_000, record, replace=True)
        with pytest.raises(SessionBusy):
            await chat.send(TURNS[2], **GREEDY)
        assert (await chat.send(TURNS[2], **GREEDY)).token_ids == expected[1].token_ids


async def test_a_seed_repeats_a_turn_and_without_one_each_turn_has_its_own(client: AsyncClient) -> None:
    sampled: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "temperature": 1.0}
    prompts = [5, 6, 7], [8, 9]
    seconds = []
    for seed in (12, 12, 11, None, None):
        async with client.session() as session:
            first = await session.generate(prompts[0], **sampled, seed=11)
            seconds.append((await session.generate(prompts[1], **sampled, seed=seed)).token_ids)
    whole = [*prompts[0], *first.token_ids, *prompts[1]]
    alone, other = [(await client.generate(whole, **sampled, seed=seed)).token_ids for seed in (12, 11)]
    assert seconds[:3] == [alone, alone, other]
    assert len(set(seconds)) == 4, "a turn without a seed takes a fresh one"


async def test_a_session_of_text_is_one_text(client: AsyncClient) -> None:
    whole = await client.generate("the thin man in the tent", max_tokens=8, ignore_eos=True)
    async with client.session() as session:
        first = await session.generate("the thin man", max_tokens=1, ignore_eos=True)
        more = await session.generate(" in the tent", max_tokens=8, ignore_eos=True)
        assert more.usage.cached_tokens == first.usage.prompt_tokens
        assert more.usage.prompt_tokens == first.usage.prompt_tokens + 1 + len(
            (await client.tokenize(" in the tent", special_tokens=False)).token_ids
        )
    assert len(whole.token_ids) == len(more.token_ids) == 8


async def test_idle_conversations_make_room_and_go_on_all_the_same(swarm: Swarm, client: AsyncClient) -> None:
    """More conversations than there are pages for: the caches of idle ones go, their texts stay."""
    prompt = "the thin man in the inner tent " * 9
    answers = [client.chat() for _ in range(8)]
    first = [
        await chat.send(f"{number} {prompt}", max_tokens=60, ignore_eos=True) for number, chat in enumerate(answers)
    ]
    assert sum(len(server.sessions) for server in swarm.servers) < len(swarm.servers) * len(answers)
    oldest = await answers[0].send("and then?", **GREEDY)
    assert oldest.usage.cached_tokens == 0
    newest = await answers[-1].send("and then?", **GREEDY)
    assert newest.usage.cached_tokens > 0
    assert all(len(reply.token_ids) == 60 for reply in first)
    for chat in answers:
        await chat.close()


async def test_a_session_that_does_not_fit_is_refused_and_leaves_nothing(swarm: Swarm, client: AsyncClient) -> None:
    request = pb.GenerateRequest(
        text="the thin man", num_completions=16, stopping=pb.StoppingParameters(max_tokens=400, ignore_eos=True)
    )
    async with open_channel(swarm.address) as channel:
        for method in ("Generate", "GenerateStream"):
            refused = await refusal(channel, method, request)
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_PAGES")
            assert refused.retry_after_s > 0
            assert refused.details["QuotaFailure"].violations
            await swarm.until_empty()
