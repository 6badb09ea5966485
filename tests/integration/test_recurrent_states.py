"""Models with a recurrent state: forks, turns, deaths, departures and refusals, with the unsplit model's tokens."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import InvalidRequest, UnsupportedFamily
from corolla.decoding.draft_model import DraftModel
from corolla.hf import AutoDistributedModelForCausalLM
from corolla.models.checkpoint import Checkpoint
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.deaths import answer_across_a_death
from tests.integration.gates import hand_over
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.reference import Sampling, Unsplit
from tests.tiers import covering, quick

PROMPT = "the thin man in the inner tent " * 6
SPANS = ["0:2", "2:5"]
SAMPLED: Sampling = {"temperature": 1.1, "top_p": 0.95, "seed": 7}
# A short convolution, linear attention, a state beside attention, a scan that begins anew.
KINDS = ("lfm2", "qwen3_next", "falcon_h1", "jamba")
# States travel as bytes, whatever they hold; a state beside attention travels with keys and values.
some_kinds = pytest.mark.parametrize("family", quick(("lfm2", "falcon_h1"), "lfm2", kinds=["falcon_h1"]))
# The rules of a hop are the same for each kind of state, so the gate need not test them with all.
each_in_turn = pytest.mark.parametrize("family", quick(KINDS, KINDS[0]))


def checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    return make_tiny_checkpoint(family, folder / "tiny", config_changes={"max_position_embeddings": 8192, **changes})


def swarm_of(folder: Path, model: Path, **settings: Any) -> Swarm:
    client = {"prefill_chunk_tokens": 24, "recovery_patience_s": 30.0, **settings.pop("client", {})}
    return Swarm(folder, model, SPANS, server={"grace_s": 120.0, "kv_cache_mib": 16}, client=client, **settings)


DEATHS = covering(KINDS, [1, 0], ["sampled", "greedy"])


@pytest.mark.parametrize(
    "death", quick(DEATHS, DEATHS[0], kinds=[next(each for each in DEATHS if each[0] == kind) for kind in KINDS[1:]])
)
async def test_a_hop_that_dies_in_mid_answer_is_replaced(tmp_path: Path, death: tuple[str, int, str]) -> None:
    family, hop, way = death
    sampling: Sampling = SAMPLED if way == "sampled" else {}
    model = checkpoint(tmp_path, family)
    unsplit = Unsplit(model)
    prompt_ids = unsplit.encode(PROMPT)
    expected = unsplit.generate(prompt_ids, 60, sampling, ignore_eos=True).token_ids
    async with swarm_of(tmp_path, model) as swarm, swarm.connect() as client:
        options = {"max_tokens": 60, "ignore_eos": True, **sampling}
        answer = await answer_across_a_death(swarm, client, hop, len(prompt_ids) + 30, PROMPT, **options)
        assert list(answer.token_ids) == expected


@each_in_turn
async def test_completions_of_one_prompt_are_replayed_where_its_state_has_moved_on(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family)
    unsplit = Unsplit(model)
    prompt_ids = unsplit.encode(PROMPT)
    async with swarm_of(tmp_path, model) as swarm, swarm.connect() as client:
        answer = await client.generate(PROMPT, n=3, max_tokens=20, ignore_eos=True, **SAMPLED)
        await swarm.until_empty()
    for index, completion in enumerate(answer.completions):
        seeded: Sampling = {**SAMPLED, "seed": 7 + index}
        assert list(completion.token_ids) == unsplit.generate(prompt_ids, 20, seeded, ignore_eos=True).token_ids
    assert answer.usage.cached_tokens == 0


@each_in_turn
async def test_turns_of_a_conversation_go_on_where_hops_can_and_are_replayed_where_not(
    tmp_path: Path, family: str
) -> None:
    model = checkpoint(tmp_path, family)
    unsplit = Unsplit(model)
    async with swarm_of(tmp_path, model) as swarm, swarm.connect() as client:
        session_id = (await client.create_session()).session_id
        log: list[int] = []
        for turn in range(4):
            # A stop sequence ends an answer behind what hops have computed of it already.
            log += new_ids(turn)
            expected = unsplit.generate(log, 30, ignore_eos=True)
            stop = [unsplit.decode(expected.token_ids)[8:10]] if turn % 2 else []
            answer = await client.generate(new_ids(turn), max_tokens=30, ignore_eos=True, stop=stop, session=session_id)
            num_tokens = len(answer.token_ids)
            assert list(answer.token_ids) == expected.token_ids[:num_tokens]
            assert num_tokens < 30 if stop else num_tokens == 30
            log += answer.token_ids
        await client.delete_session(session_id)
        await swarm.until_empty()


def new_ids(turn: int) -> list[int]:
    return [5 + (7 * turn + 3 * index) % 200 for index in range(11)]


@each_in_turn
async def test_texts_continue_from_states_that_others_left(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family)
    unsplit = Unsplit(model)
    first = [5 + 7 * index % 200 for index in range(150)]
    expected = unsplit.generate(first, 50, ignore_eos=True).token_ids
    async with swarm_of(tmp_path, model) as swarm, swarm.connect() as client:
        for prompt, num_cached in (
            (first, 0),
            # The last end of a page in the prompt, and one that a chunk of it had.
            (first, 128),
            ([*first[:140], *[9] * 30], 128),
            ([*first[:100], *[8] * 30], 96),
            # The last end of a page in the answer.
            ([*first, *expected, 3, 4], 192),
        ):
            answer = await client.generate(prompt, max_tokens=50, ignore_eos=True)
            assert list(answer.token_ids) == unsplit.generate(prompt, 50, ignore_eos=True).token_ids
            assert answer.usage.cached_tokens == num_cached
        answer = await answer_across_a_death(swarm, client, 1, 180, first, max_tokens=50, ignore_eos=True)
        assert list(answer.token_ids) == expected
        await swarm.until_empty()


@some_kinds
async def test_a_server_that_leaves_hands_states_over_and_nothing_is_computed_twice(
    tmp_path: Path, family: str
) -> None:
    model = checkpoint(tmp_path, family)
    unsplit = Unsplit(model)
    expected = unsplit.generate(unsplit.encode(PROMPT), 240, SAMPLED, ignore_eos=True).token_ids
    async with swarm_of(tmp_path, model) as swarm, swarm.connect() as client:
        answering = asyncio.create_task(client.generate(PROMPT, max_tokens=240, ignore_eos=True, **SAMPLED))
        for _ in range(2):
            await hand_over(swarm, 0, 100)
        answer = await answering
        assert list(answer.token_ids) == expected
        assert answer.usage.recoveries == 2
        assert await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total") == 0
        for server in swarm.servers:
            assert (
                await sample(server.metrics_port, "corolla_hop_invariant_violations_total", invariant="promises") == 0
            )
        await swarm.until_empty()


@each_in_turn
async def test_speculation_is_refused_and_no_default(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family)
    async with swarm_of(tmp_path, model, client={"speculation": "prompt_lookup"}) as swarm, swarm.connect() as client:
        answer = await client.generate([5, 6, 7] * 5, max_tokens=9, ignore_eos=True)
        assert (len(answer.token_ids), answer.usage.drafted_tokens) == (9, 0)
        for mode in ("prompt_lookup", "draft_model"):
            with pytest.raises(InvalidRequest, match="recurrent state"):
                await client.generate("the", speculation=mode)
        load = partial(AutoDistributedModelForCausalLM.from_pretrained, edges="remote", router=swarm.router_address)
        remote = await asyncio.to_thread(load, str(model))
        prompt = torch.tensor([[5, 6, 7] * 5])
        with pytest.raises(UnsupportedFamily, match="recurrent state"):
            await asyncio.to_thread(remote.generate, prompt, max_new_tokens=4, prompt_lookup_num_tokens=2)
        await asyncio.to_thread(remote.generate, prompt, max_new_tokens=4)
        await swarm.until_empty()
    plain = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "plain")))
    hybrid = Checkpoint.from_pretrained(str(model))
    for drafting, target in ((hybrid, plain), (plain, hybrid)):
        with pytest.raises(UnsupportedFamily, match="recurrent state"):
            DraftModel.load(drafting, target, dtype=torch.float32, device="cpu")


@each_in_turn
async def test_states_count_against_the_memory_for_keys_and_values(tmp_path: Path, family: str) -> None:
    model = checkpoint(tmp_path, family)
    async with Swarm(tmp_path, model, ["0:5"], server={"kv_cache_mib": 16}) as swarm, swarm.connect() as client:
        (server,) = swarm.servers
        cache = server.engine.runner.new_cache()  # type: ignore[attr-defined]
        assert cache.worst_case(0) == 0
        answer = await client.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
        store = cache.store
        num_state_bytes = 3 * sum(shape.nbytes for shape in store.state_shapes.values())
        assert store.num_state_pages * store.page_bytes >= num_state_bytes > 0
        most_sessions = store.pool.num_pages // cache.worst_case(1)
        assert store.pool.num_pages * store.page_bytes + most_sessions * num_state_bytes <= 16 << 20
        await swarm.until_empty()
