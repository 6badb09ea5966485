"""The multi-token prediction block drafts on the last hop, and no answer changes: not by drafts, losses or moves."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from corolla.chassis.errors import StartupError
from corolla.sdk.async_client import AsyncClient
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.deaths import answer_across_a_death
from tests.integration.gates import held_up, until_held
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.mtp_models import WholeMtp, make_trained_checkpoint, some_prompts

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]

PAGE_TOKENS = 16
DRAFT, OFF = "draft_model", "off"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
GREEDY: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}
SPANS = ["0:2", "2:4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, before, after = make_trained_checkpoint(tmp_path_factory.mktemp("mtp") / "tiny")
    log.info("of unseen answers, a random block predicts %.2f, the trained one %.2f", before, after)
    assert after > before + 0.1
    return folder


def swarm_of(model: Path, **server: Any) -> Swarm:
    settings = {"draft_model": "mtp", "page_tokens": PAGE_TOKENS, "grace_s": 60.0, **server}
    client = {
        "prefill_chunk_tokens": 16, "speculation": DRAFT, "max_draft_tokens": 2, "adaptive_drafts": False,
        "recovery_patience_s": 30.0,
    }  # fmt: skip
    return Swarm(model.parent, model, SPANS, server=settings, client=client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(trained: Path) -> AsyncIterator[Swarm]:
    async with swarm_of(trained) as swarm:
        yield swarm


@pytest_asyncio.fixture(loop_scope="module")
async def client(swarm: Swarm) -> AsyncIterator[AsyncClient]:
    async with swarm.connect() as client:
        yield client
    await swarm.until_empty()


async def test_answers_are_those_without_drafts_and_a_trained_block_is_right_more_often(
    swarm: Swarm, client: AsyncClient, trained: Path
) -> None:
    prompts = some_prompts(4, 12, seed=1).tolist()
    truth = WholeMtp.of(trained).texts(torch.tensor(prompts), GREEDY["max_tokens"])[:, 12:].tolist()
    answers = await asyncio.gather(*(client.generate(each, **GREEDY) for each in prompts))
    assert [list(each.token_ids) for each in answers] == truth
    num_drafted, num_accepted = (
        sum(getattr(each.usage, name) for each in answers) for name in ("drafted_tokens", "accepted_tokens")
    )
    log.info("of %d tokens that the trained block drafted, two at a time, %d were right", num_drafted, num_accepted)
    assert num_accepted > 0.1 * num_drafted
    for options in (SAMPLED, {"temperature": 1.2, "seed": 3, "repetition_penalty": 1.2, "max_draft_tokens": 5}):
        expected = [await client.generate(each, **GREEDY, **options, speculation=OFF) for each in prompts[:2]]
        got = await asyncio.gather(*(client.generate(each, **GREEDY, **options) for each in prompts[:2]))
        assert [each.token_ids for each in got] == [each.token_ids for each in expected]
        assert all(each.usage.drafted_tokens for each in got)


async def test_answers_that_share_a_beginning_and_turns_draft_on_its_pages(swarm: Swarm, client: AsyncClient) -> None:
    prefix = some_prompts(1, 64, seed=4)[0].tolist()
    prompts = [prefix + tail for tail in some_prompts(3, 7, seed=5).tolist()]
    expected = [await client.generate(each, **GREEDY, speculation=OFF, cache_salt="apart") for each in prompts]
    answers = [await client.generate(each, **GREEDY, cache_salt="ours") for each in prompts]
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    assert [each.usage.cached_tokens for each in answers] == [0, 64, 64]
    assert all(each.usage.drafted_tokens for each in answers)

    async def converse(**options: Any) -> list[tuple[int, ...]]:
        async with client.session() as session:
            return [
                (await session.generate(text, max_tokens=20, ignore_eos=True, **options)).token_ids
                for text in ("the thin man", " in the inner tent", " the")
            ]

    assert await converse() == await converse(speculation=OFF)
    await swarm.until_empty()


@pytest.mark.parametrize("hop, options", [(0, SAMPLED), (1, {})])
async def test_a_hop_that_dies_is_replaced(trained: Path, hop: int, options: dict[str, Any]) -> None:
    async with swarm_of(trained, prefix_cache=False) as swarm, swarm.connect() as client:
        prompt = some_prompts(1, 40, seed=6)[0].tolist()
        expected = await client.generate(prompt, **GREEDY, **options, speculation=OFF)
        answer = await answer_across_a_death(swarm, client, hop, 55, prompt, **GREEDY, **options)
        assert answer.token_ids == expected.token_ids
        assert answer.usage.drafted_tokens


async def test_the_block_goes_with_its_session_and_servers_without_it_take_the_session_too(trained: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    async with swarm_of(trained) as swarm, swarm.connect() as client:
        prompt = some_prompts(1, 40, seed=7)[0].tolist()
        expected = await client.generate(prompt, **options, speculation=OFF)
        answering = asyncio.create_task(client.generate(prompt, **options))
        for number, draft_model in ((0, "mtp"), (0, "mtp"), (1, None), (1, "mtp")):
            leaving = swarm.servers.pop(number)
            await until_held(leaving, 1, 40)
            with held_up(leaving):
                taker = await swarm.add_server(leaving.settings.blocks, draft_model=draft_model)
            await asyncio.wait_for(leaving.stop(), 60)
            assert await sample(taker.metrics_port, "corolla_handover_bytes_total", direction="in") > 0
        answer = await answering
        assert (answer.token_ids, answer.usage.recoveries) == (expected.token_ids, 4)
        assert await sample(swarm.clients[0].metrics_port, "corolla_recomputed_tokens_total") == 0
        await swarm.until_empty()


async def test_the_placement_counts_the_block_and_a_model_without_one_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    servers = [each.server for each in (await swarm.placement()).servers]
    # One block, the embedding, which is as large as the head, and the projection.
    assert all(each.draft_blocks > 1 + each.head_blocks for each in servers)
    other = make_tiny_checkpoint("llama", tmp_path / "other")
    with pytest.raises(StartupError, match="multi-token prediction block"):
        await swarm.add_server("0:2", model=str(other))
