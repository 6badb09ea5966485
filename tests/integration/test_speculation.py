"""Speculation changes how many passes an answer takes, and nothing else of it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import CheckpointError, InvalidRequest
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import FinishReason, Generation
from corolla.v1 import router_pb2, router_pb2_grpc
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm
from tests.tiers import quick

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOKUP, DRAFT, ADAPTIVE = range(3)
"""The swarm's client services: their drafts are always as long as can be, save for the third's."""

REPETITIVE: dict[str, Any] = {"frequency_penalty": -1.5}


@asynccontextmanager
async def swarm_with(model: Path, draft_model: Path | None) -> AsyncIterator[Swarm]:
    server = {} if draft_model is None else {"draft_model": str(draft_model)}
    async with Swarm(model.parent, model, ["0:2", "2:5"], num_clients=0, server=server) as swarm:
        fixed: dict[str, Any] = {"adaptive_drafts": False, "prefill_chunk_tokens": 16}
        await swarm.add_client(**fixed, max_draft_tokens=5, speculation="prompt_lookup")
        await swarm.add_client(**fixed, max_draft_tokens=3, speculation="draft_model")
        await swarm.add_client(speculation="prompt_lookup")
        await swarm.until_ready()
        yield swarm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Windows that are shorter than the texts: forgetting draft tokens must bring back what the window had left.
    model = make_tiny_checkpoint("mistral", tmp_path_factory.mktemp("speculation") / "tiny")
    # Many tokens end an answer, so that some answers do end.
    settings = model / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [1, *range(4, 300, 8)]}))
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(model: Path) -> AsyncIterator[Swarm]:
    """Its draft model is the target itself."""
    async with swarm_with(model, model) as swarm:
        yield swarm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_stranger(model: Path) -> AsyncIterator[Swarm]:
    """Its draft model has other weights than the target."""
    other = make_tiny_checkpoint("mistral", model.parent / "other", seed=1, num_blocks=2)
    async with swarm_with(model, other) as swarm:
        yield swarm


def draw_case(number: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt, with or without repetitions, and options of which many end the answer early."""
    chosen = random.Random(number)
    pattern = [chosen.randrange(4, 300) for _ in range(chosen.randrange(1, 9))]
    prompt = pattern * chosen.randrange(1, 6) if number % 3 else [chosen.randrange(4, 300) for _ in range(40)]
    options: dict[str, Any] = {"max_tokens": chosen.choice([1, 2, 3, 17, 40])}
    if chosen.random() < 0.6:
        options |= {"temperature": chosen.choice([0.3, 0.8, 1.0]), "seed": number}
        options |= chosen.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
    # A random model seldom repeats itself, unless it is rewarded for it.
    options |= chosen.choice(
        [{}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.2}, {"presence_penalty": -1.0}, REPETITIVE]
    )
    if chosen.random() < 0.3:
        options["logprobs"] = 2
    if chosen.random() < 0.5:
        options["ignore_eos"] = True
    return prompt, options


def assert_same(got: Generation, expected: Generation, where: str) -> None:
    assert got.token_ids == expected.token_ids, where
    assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason), where
    for mine, its in zip(got.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
        assert [each.token_id for each in mine.top] == [each.token_id for each in its.top]


@pytest.mark.parametrize("service", quick([LOOKUP, DRAFT, ADAPTIVE], DRAFT), ids=["lookup", "draft", "adaptive"])
async def test_answers_are_those_of_plain_decoding(swarm: Swarm, service: int) -> None:
    await check_answers(swarm, service)


@pytest.mark.full
async def test_answers_are_those_of_plain_decoding_whatever_the_draft_model_says(with_stranger: Swarm) -> None:
    await check_answers(with_stranger, DRAFT)


async def check_answers(swarm: Swarm, service: int) -> None:
    num_drafted = num_accepted = 0
    finish_reasons = set()
    async with swarm.connect(service) as client:
        for number in range(24):
            prompt, options = draw_case(number)
            expected = await client.generate(prompt, **options, speculation="off")
            if number % 3 == 0 and len(expected.text) > 6:
                options["stop"] = [expected.text[4:6]]
                expected = await client.generate(prompt, **options, speculation="off")
            got = await client.generate(prompt, **options)
            assert_same(got, expected, f"case {number}: {options}")
            assert expected.usage.drafted_tokens == 0
            assert got.usage.accepted_tokens <= got.usage.drafted_tokens
            num_drafted += got.usage.drafted_tokens
            num_accepted += got.usage.accepted_tokens
            finish_reasons.add(got.finish_reason)
    assert finish_reasons == {FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP_SEQUENCE}
    assert num_drafted > num_accepted > 0
    await swarm.until_empty()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}])
async def test_a_cloned_draft_model_is_always_accepted_and_gains_one_more_token(
    swarm: Swarm, sampling: Mapping[str, Any]
) -> None:
    async with swarm.connect(DRAFT) as client:
        usage = (await client.generate([5, 6, 7], max_tokens=41, ignore_eos=True, **sampling)).usage
    # After the first token ten passes, each of three draft tokens and the token that follows them.
    assert (usage.completion_tokens, usage.drafted_tokens, usage.accepted_tokens) == (41, 30, 30)


async def test_turns_of_a_session_continue_as_without_draft_tokens(swarm: Swarm, with_stranger: Swarm) -> None:
    async def converse(client: AsyncClient, mode: str) -> list[tuple[tuple[int, ...], int]]:
        async with client.session() as session:
            turns = [
                await session.generate(text, max_tokens=12, temperature=0.7, seed=seed, speculation=mode, **REPETITIVE)
                for text, seed in (("the the the the the", 3), ("then the", 4), ("the the", 5))
            ]
        return [(turn.token_ids, turn.usage.cached_tokens) for turn in turns]

    for stack, service, mode in (
        (swarm, LOOKUP, "prompt_lookup"),
        (swarm, DRAFT, "draft_model"),
        (with_stranger, DRAFT, "draft_model"),
    ):
        async with stack.connect(service) as client:
            assert await converse(client, mode) == await converse(client, "off")
        await stack.until_empty()


async def test_streams_may_be_left_in_the_middle_of_a_pass(swarm: Swarm) -> None:
    for service in (LOOKUP, DRAFT):
        async with swarm.connect(service) as client:
            stream = client.stream([9, 8] * 8, max_tokens=200, ignore_eos=True)
            async for chunk in stream:
                if chunk.token_ids and chunk.index == 0:
                    break
            stream.close()
    await swarm.until_empty()


@pytest.mark.full
async def test_many_answers_at_once_share_their_chain(swarm: Swarm) -> None:
    """Sessions that draft tokens leave the microbatch and come back, and do not delay the others."""
    prompts = [[number, 7, 8, 9] * 4 for number in range(20, 28)]
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, **REPETITIVE}
    async with swarm.connect(LOOKUP) as client:
        expected = [await client.generate(each, speculation="off", **options) for each in prompts]
        got = await asyncio.gather(
            *(
                client.generate(each, speculation="off" if number % 2 else "prompt_lookup", **options)
                for number, each in enumerate(prompts)
            )
        )
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert sum(each.usage.accepted_tokens for each in got) > 20


async def test_draft_tokens_are_counted(swarm: Swarm) -> None:
    port = swarm.clients[DRAFT].metrics_port
    names = ("corolla_drafted_tokens_total", "corolla_accepted_draft_tokens_total")
    before = [await sample(port, name) for name in names]
    async with swarm.connect(DRAFT) as client:
        usage = (await client.generate([5, 6, 7], max_tokens=9, ignore_eos=True)).usage
    after = [await sample(port, name) for name in names]
    assert [now - then for now, then in zip(after, before, strict=True)] == [
        usage.drafted_tokens,
        usage.accepted_tokens,
    ]


async def test_unavailable_speculation_is_refused(swarm: Swarm) -> None:
    async with swarm.connect(LOOKUP) as client:
        with pytest.raises(InvalidRequest, match="max_draft_tokens"):
            await client.generate("the", speculation="prompt_lookup", max_draft_tokens=65)
        with pytest.raises(InvalidRequest, match="one of off, prompt_lookup, draft_model"):
            await client.generate("the", speculation="magic")


async def test_the_placement_knows_what_the_draft_model_takes(swarm: Swarm) -> None:
    async with open_channel(swarm.router_address) as channel:
        placement = await router_pb2_grpc.RouterServiceStub(channel).GetPlacement(router_pb2.GetPlacementRequest())
    # Five blocks, and both edges: it is the model itself.
    ready = [each.server for each in placement.servers if each.state == router_pb2.SERVER_STATE_READY]
    assert len(ready) == 2
    expected = [5 + 2 * server.head_blocks for server in ready]
    assert [server.draft_blocks for server in ready] == pytest.approx(expected, rel=0.02)


async def test_without_a_draft_model_one_may_be_the_default_and_not_be_asked_for(model: Path) -> None:
    async with swarm_with(model, None) as swarm, swarm.connect(DRAFT) as client:
        with pytest.raises(InvalidRequest, match="no draft model"):
            await client.generate("the", speculation="draft_model")
        async with client.session() as session:
            with pytest.raises(InvalidRequest, match="no draft model"):
                await session.generate("the", speculation="draft_model")
        assert (await client.generate("the", max_tokens=9)).usage.drafted_tokens == 0
        await swarm.until_empty()


async def test_a_block_server_reports_an_unusable_draft_model_at_start(swarm: Swarm, tmp_path: Path) -> None:
    foreign = make_tiny_checkpoint("llama", tmp_path / "foreign", num_blocks=1)
    vocabulary = foreign / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"the"', '"eht"').replace('"th",', '"eh",'))
    with pytest.raises(CheckpointError, match=r"another tokenizer|cannot be read"):
        await swarm.add_server("2:5", draft_model=str(foreign))
