"""Several completions of one prompt: processed once, forked on the hops, and each as if it were alone."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corolla.compute.base import RowWork
from corolla.sdk.results import Generation
from tests.checkpoints import make_tiny_checkpoint
from tests.faulty_runner import plant_fault
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.reference import Sampling, Unsplit
from tests.tiers import quick

PROMPT = "the thin man in the inner tent " * 6
SPANS = ["0:2", "2:5"]
NUM_COMPLETIONS = 4
NUM_TOKENS = 24
SEED = 11
SAMPLING: Sampling = {"temperature": 1.3, "top_p": 0.95, "seed": SEED}


def checkpoint(folder: Path, family: str = "llama") -> Path:
    return make_tiny_checkpoint(family, folder / "tiny", config_changes={"max_position_embeddings": 8192})


async def expected(model: Path, num_completions: int, num_tokens: int = NUM_TOKENS, **options: Any) -> list[list[int]]:
    """The unsplit model's answers with each completion's own seed."""
    unsplit = Unsplit(model)
    prompt_ids = unsplit.encode(PROMPT)
    answers = []
    for index in range(num_completions):
        sampling: Sampling = {**SAMPLING, "seed": SEED + index}
        reference = await asyncio.to_thread(unsplit.generate, prompt_ids, num_tokens, sampling, **options)
        answers.append(reference.token_ids)
    assert len({tuple(answer) for answer in answers}) == num_completions
    return answers


def tokens(generation: Generation) -> list[list[int]]:
    return [list(completion.token_ids) for completion in generation.completions]


async def computed(swarm: Swarm, kind: str) -> list[float]:
    """Tokens that each server computed."""
    return [await sample(server.metrics_port, "corolla_hop_tokens_total", kind=kind) for server in swarm.servers]


@pytest.mark.parametrize(
    "family, has_prefix_cache",
    [
        ("llama", True),
        *(pytest.param(family, False, marks=pytest.mark.full) for family in ("llama", "mistral", "gpt2")),
    ],
)
async def test_the_prompt_is_processed_once(tmp_path: Path, family: str, has_prefix_cache: bool) -> None:
    model = checkpoint(tmp_path, family)
    # Small chunks: the last one is not the whole prompt.
    client = {"prefill_chunk_tokens": 24}
    async with Swarm(tmp_path, model, SPANS, server={"prefix_cache": has_prefix_cache}, client=client) as swarm:
        async with swarm.connect() as caller:
            before = {kind: await computed(swarm, kind) for kind in ("prefill", "decode")}
            generation = await caller.generate(
                PROMPT, n=NUM_COMPLETIONS, max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING
            )
        after = {kind: await computed(swarm, kind) for kind in ("prefill", "decode")}
        await swarm.until_empty()
    assert tokens(generation) == await expected(model, NUM_COMPLETIONS, ignore_eos=True)
    usage = generation.usage
    assert (usage.completion_tokens, usage.cached_tokens, usage.recoveries) == (NUM_COMPLETIONS * NUM_TOKENS, 0, 0)
    by_kind = {kind: [now - earlier for now, earlier in zip(after[kind], before[kind], strict=True)] for kind in after}
    # Each fork computes the prompt's last token for itself, and no answer its own last one.
    num_decoded = NUM_COMPLETIONS - 1 + NUM_COMPLETIONS * (NUM_TOKENS - 1)
    assert [sum(each) for each in zip(*by_kind.values(), strict=True)] == [usage.prompt_tokens + num_decoded] * 2


@pytest.mark.full
async def test_each_completion_ends_by_itself(tmp_path: Path) -> None:
    """Each is equal, also the first one, from which the others were forked."""
    model = checkpoint(tmp_path)
    answers = await expected(model, 8, 200, ignore_eos=False)
    assert len({len(answer) for answer in answers}) > 1
    async with Swarm(tmp_path, model, SPANS) as swarm, swarm.connect() as caller:
        assert tokens(await caller.generate(PROMPT, n=8, max_tokens=200, **SAMPLING)) == answers
        # All of them end with the very first token.
        shortest = await caller.generate(PROMPT, n=8, max_tokens=1, ignore_eos=True, **SAMPLING)
        assert [ids[:1] for ids in answers] == tokens(shortest)
        one_token = await caller.generate([40], n=3, max_tokens=4, ignore_eos=True, **SAMPLING)
        for index in range(3):
            sampling: Sampling = {**SAMPLING, "seed": SEED + index}
            alone = await caller.generate([40], max_tokens=4, ignore_eos=True, **sampling)
            assert one_token.completions[index].token_ids == alone.token_ids
        await swarm.until_empty()


async def test_a_completion_without_room_on_the_first_chain_goes_to_another(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    async with Swarm(tmp_path, model, ["0:5", "0:5"], server={"kv_cache_mib": 1, "prefix_cache": False}) as swarm:
        num_tokens = [each.num_pages * each.page_tokens for each in await swarm.statuses()]
        async with swarm.connect() as caller:
            stream = caller.stream(PROMPT, n=2, max_tokens=min(num_tokens) * 2 // 3, ignore_eos=True, **SAMPLING)
            received: dict[int, list[int]] = {0: [], 1: []}
            held: Sequence[Any] = ()
            async with stream:
                async for chunk in stream:
                    received[chunk.index].extend(chunk.token_ids)
                    if not held and all(received.values()):
                        held = await swarm.statuses()
                    if min(map(len, received.values())) >= NUM_TOKENS:
                        break
        assert [each.num_sessions for each in held] == [1, 1]
        await swarm.until_empty()
    assert [received[index][:NUM_TOKENS] for index in (0, 1)] == await expected(model, 2, ignore_eos=True)


@pytest.mark.parametrize("num_iterations", quick([0, 3, 6, 10], 3))
async def test_a_hop_may_die_at_any_moment(tmp_path: Path, num_iterations: int) -> None:
    """In the prompt, at the fork, and while all completions run."""
    model = checkpoint(tmp_path)
    client = {"prefill_chunk_tokens": 48, "recovery_patience_s": 30.0}
    async with Swarm(tmp_path, model, [*SPANS, "2:5"], server={"prefix_cache": False}, client=client) as swarm:
        async with swarm.connect() as caller:
            asking = asyncio.create_task(
                caller.generate(PROMPT, n=NUM_COMPLETIONS, max_tokens=NUM_TOKENS, ignore_eos=True, **SAMPLING)
            )
            victim = await busy(swarm, num_iterations)
            swarm.servers.remove(victim)
            await victim.stop()
            generation = await asking
        await swarm.until_empty()
    assert tokens(generation) == await expected(model, NUM_COMPLETIONS, ignore_eos=True)


async def test_forks_recover_from_a_hop_that_dies_while_they_stream(tmp_path: Path) -> None:
    """The hop dies at the tenth token of the answers: each of the forks fills the hop that replaces it."""
    model, num_completions = checkpoint(tmp_path), 3
    options: dict[str, Any] = {"n": num_completions, "max_tokens": NUM_TOKENS, "ignore_eos": True, **SAMPLING}
    client = {"prefill_chunk_tokens": 48, "recovery_patience_s": 30.0}
    async with Swarm(tmp_path, model, SPANS, server={"prefix_cache": False}, client=client) as swarm:
        async with swarm.connect() as caller:
            undisturbed = await caller.generate(PROMPT, **options)
            victim, loop, num_held = swarm.servers.pop(), asyncio.get_running_loop(), list[int]()

            def die(rows: Sequence[RowWork]) -> None:
                if not num_held and max(row.position for row in rows) >= undisturbed.usage.prompt_tokens + 9:
                    num_held.append(len(victim.sessions))
                    asyncio.run_coroutine_threadsafe(swarm.crash(victim), loop).result()

            plant_fault(victim.engine.runner, before=die)

            async def replace_victim() -> None:
                await until(lambda: num_held)
                await swarm.add_server("2:5")

            replacing = asyncio.create_task(replace_victim())
            received: list[list[int]] = [[] for _ in range(num_completions)]
            usages = []
            async with caller.stream(PROMPT, **options) as stream:
                async for chunk in stream:
                    received[chunk.index].extend(chunk.token_ids)
                    usages.append(chunk.usage)
            await replacing
        await swarm.until_empty()
        await victim.stop()
    assert num_held == [num_completions]
    assert received == tokens(undisturbed) == await expected(model, num_completions, ignore_eos=True)
    assert [usage.recoveries for usage in usages if usage is not None] == [num_completions]


async def busy(swarm: Swarm, num_iterations: int) -> Any:
    """The server of the second span that has computed so much, as soon as it has."""
    while True:
        for server in swarm.servers[1:]:
            name = "corolla_hop_step_seconds_count"
            if await sample(server.metrics_port, name) > num_iterations:
                return server
        await asyncio.sleep(0)
