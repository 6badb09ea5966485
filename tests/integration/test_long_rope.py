"""Models whose rotary embedding has other factors for long texts, on chains, beside `generate()` of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.hf import AutoDistributedModelForCausalLM
from tests.checkpoints import LONG_ROPE_LENGTH, make_long_rope_checkpoint
from tests.integration.deaths import answer_across_a_death
from tests.integration.gates import hand_over
from tests.integration.swarm import Swarm
from tests.reference import Sampling, Unsplit
from tests.tiers import quick

TWO_HOPS, THREE_HOPS = ["0:2", "2:5"], ["0:1", "1:3", "3:5"]
CHUNK_TOKENS, PAGE_TOKENS = 16, 8
NUM_NEW_TOKENS = 24
SAMPLED: Sampling = {"temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 7}
# Texts that stay short, become long in the middle of the answer, with its first token or the one before, and are long.
LENGTHS = (
    20, LONG_ROPE_LENGTH - NUM_NEW_TOKENS // 2, LONG_ROPE_LENGTH - 1, LONG_ROPE_LENGTH, LONG_ROPE_LENGTH + 1,
    LONG_ROPE_LENGTH + 40,
)  # fmt: skip


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(4, 256, (200,), generator=generator).tolist()
    return drawn[:num_tokens]


def swarm_of(folder: Path, model: Path, spans: list[str], **settings: Any) -> Swarm:
    client = {"prefill_chunk_tokens": CHUNK_TOKENS, "recovery_patience_s": 30.0, **settings.pop("client", {})}
    server = {"kv_cache_mib": 16, "page_tokens": PAGE_TOKENS, "grace_s": 120.0}
    return Swarm(folder, model, spans, server=server, client=client, **settings)


@pytest.mark.parametrize("family", quick(["phi3", "phimoe"], "phi3"))
async def test_texts_that_become_long_are_those_of_the_unsplit_model(tmp_path: Path, family: str) -> None:
    """All at once, twice, so that the second time their beginnings are cached: of short texts, and of long ones."""
    model = make_long_rope_checkpoint(family, tmp_path / "tiny")
    unsplit = Unsplit(model)
    ways: tuple[Sampling, ...] = ({}, SAMPLED)
    streams = [(length, sampling) for length in LENGTHS for sampling in ways]
    expected = [
        unsplit.generate(prompt_of(length), NUM_NEW_TOKENS, sampling, ignore_eos=True).token_ids
        for length, sampling in streams
    ]
    async with swarm_of(tmp_path, model, THREE_HOPS) as swarm, swarm.connect() as client:
        for num_known in (0, 1):
            answers = await asyncio.gather(
                *(
                    client.generate(prompt_of(length), max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **sampling)
                    for length, sampling in streams
                )
            )
            for (length, sampling), answer, token_ids in zip(streams, answers, expected, strict=True):
                where = f"{length} prompt tokens, {sampling or 'greedy'}"
                assert list(answer.token_ids) == token_ids, where
                assert answer.usage.recoveries == 0, where
                if num_known:
                    assert answer.usage.cached_tokens == (length - 1) // PAGE_TOKENS * PAGE_TOKENS, where
        await swarm.until_empty()


async def test_pages_of_short_texts_are_not_those_of_long_ones(tmp_path: Path) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    async with swarm_of(tmp_path, model, TWO_HOPS) as swarm, swarm.connect() as client:
        await client.generate(prompt_of(LONG_ROPE_LENGTH - 10), max_tokens=2, ignore_eos=True)
        for num_cached in (0, LONG_ROPE_LENGTH + 8):
            answer = await client.generate(prompt_of(LONG_ROPE_LENGTH + 9), max_tokens=2, ignore_eos=True)
            assert answer.usage.cached_tokens == num_cached


@pytest.mark.kind
async def test_draft_tokens_do_not_go_beyond_the_short_factors(tmp_path: Path) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    # The bias leaves so few tokens that what follows often followed before.
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "logit_bias": {5: 20.0, 6: 20.0, 7: 20.0}}
    plainly = {"adaptive_drafts": False}
    async with swarm_of(tmp_path, model, TWO_HOPS, client=plainly) as swarm, swarm.connect() as client:
        for length in range(LONG_ROPE_LENGTH - 24, LONG_ROPE_LENGTH, 9):
            plain, drafted = await asyncio.gather(
                client.generate(prompt_of(length), **options),
                client.generate(prompt_of(length), speculation="prompt_lookup", **options),
            )
            assert drafted.token_ids == plain.token_ids
            assert drafted.usage.accepted_tokens > 10
            assert drafted.usage.recoveries == 0


async def test_completions_of_a_prompt_become_long_each_for_itself(tmp_path: Path) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    unsplit = Unsplit(model)
    prompt_ids = prompt_of(LONG_ROPE_LENGTH - 5)
    async with swarm_of(tmp_path, model, TWO_HOPS) as swarm, swarm.connect() as client:
        answer = await client.generate(prompt_ids, n=3, max_tokens=20, ignore_eos=True, **SAMPLED)
        await swarm.until_empty()
    for index, completion in enumerate(answer.completions):
        seeded: Sampling = {**SAMPLED, "seed": 7 + index}
        assert list(completion.token_ids) == unsplit.generate(prompt_ids, 20, seeded, ignore_eos=True).token_ids


async def test_conversations_become_long_between_turns_and_within_them(tmp_path: Path) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    unsplit = Unsplit(model)
    async with swarm_of(tmp_path, model, TWO_HOPS) as swarm, swarm.connect() as client:
        for num_new in (9, 20):
            session_id = (await client.create_session()).session_id
            log: list[int] = []
            for turn in range(6):
                new_ids = prompt_of(num_new, seed=turn)
                log += new_ids
                expected = unsplit.generate(log, 10, ignore_eos=True).token_ids
                answer = await client.generate(new_ids, max_tokens=10, ignore_eos=True, session=session_id)
                assert list(answer.token_ids) == expected, f"turn {turn}, {len(log)} tokens"
                log += answer.token_ids
            assert len(log) > LONG_ROPE_LENGTH + 30
            await client.delete_session(session_id)
        await swarm.until_empty()


@pytest.mark.parametrize(
    "num_tokens_at_death", quick([LONG_ROPE_LENGTH - 4, LONG_ROPE_LENGTH + 4], LONG_ROPE_LENGTH - 4)
)
@pytest.mark.parametrize("hop", quick([0, 1], 1))
async def test_a_hop_that_dies_before_or_behind_that_place_is_replaced(
    tmp_path: Path, hop: int, num_tokens_at_death: int
) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    unsplit = Unsplit(model)
    prompt_ids, chain = prompt_of(LONG_ROPE_LENGTH - 10), TWO_HOPS
    expected = unsplit.generate(prompt_ids, 40, SAMPLED, ignore_eos=True).token_ids
    async with swarm_of(tmp_path, model, chain) as swarm, swarm.connect() as client:
        options = {"max_tokens": 40, "ignore_eos": True, **SAMPLED}
        answer = await answer_across_a_death(swarm, client, hop, num_tokens_at_death, prompt_ids, **options)
        assert list(answer.token_ids) == expected


@pytest.mark.full
async def test_a_server_that_leaves_hands_long_texts_over_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    unsplit = Unsplit(model)
    prompt_ids = prompt_of(LONG_ROPE_LENGTH - 10)
    expected = unsplit.generate(prompt_ids, 300, ignore_eos=True).token_ids
    async with swarm_of(tmp_path, model, TWO_HOPS) as swarm, swarm.connect() as client:
        answering = asyncio.create_task(client.generate(prompt_ids, max_tokens=300, ignore_eos=True))
        await hand_over(swarm, 0, LONG_ROPE_LENGTH + 10)
        answer = await answering
        assert list(answer.token_ids) == expected
        assert answer.usage.recoveries == 1


def test_sessions_of_the_library_hold_short_texts_only_and_remote_models_all(tmp_path: Path) -> None:
    model = make_long_rope_checkpoint("phi3", tmp_path / "tiny")
    unsplit = Unsplit(model)
    library: Any = AutoDistributedModelForCausalLM
    ids = torch.tensor([prompt_of(LONG_ROPE_LENGTH - 5)])

    def ask(router: str) -> None:
        local = library.from_pretrained(model, router=router, dtype="float32")
        short = local.generate(ids, max_new_tokens=5, do_sample=False)
        assert short[0, ids.shape[1] :].tolist() == unsplit.generate(ids[0].tolist(), 5, ignore_eos=True).token_ids
        # The text ends where the session does; the last token is chosen, and not computed.
        cut = local.generate(ids, max_new_tokens=20, do_sample=False)
        assert cut[0, ids.shape[1] :].tolist() == unsplit.generate(ids[0].tolist(), 6, ignore_eos=True).token_ids
        remote = library.from_pretrained(model, router=router, dtype="float32", edges="remote")
        long = remote.generate(ids, max_new_tokens=20, do_sample=False)
        assert long[0, ids.shape[1] :].tolist() == unsplit.generate(ids[0].tolist(), 20, ignore_eos=True).token_ids

    async def run() -> None:
        async with swarm_of(tmp_path, model, TWO_HOPS) as swarm:
            await asyncio.to_thread(ask, swarm.router_address)

    asyncio.run(run())
