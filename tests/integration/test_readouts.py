"""What hops report about prompts: log probabilities and embeddings are those of the unsplit model."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
import torch

from corolla.chassis.errors import InvalidRequest
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.deaths import beyond, doom
from tests.integration.swarm import Swarm
from tests.reference import Unsplit

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "the thin man in the inner tent " * 12
CONTINUATION = " and the man in it"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"max_position_embeddings": 1024}
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("readouts") / "tiny", config_changes=changes)


@pytest.fixture(scope="module")
def unsplit(model: Path) -> Unsplit:
    return Unsplit(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    # Chunks of 16 tokens: the tokens of a prompt that are scored lie in many of them.
    client = {"http_port": 0, "prefill_chunk_tokens": 16, "recovery_patience_s": 30.0}
    folder = tmp_path_factory.mktemp("readouts-swarm")
    async with Swarm(folder, model, ["0:2", "2:5", "0:2", "2:5"], client=client) as swarm:
        yield swarm


@pytest_asyncio.fixture(loop_scope="module")
async def http(swarm: Swarm) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{swarm.clients[0].http_port}", timeout=60) as http:
        yield http


@torch.inference_mode()
def true_logprobs(unsplit: Unsplit, token_ids: Sequence[int]) -> list[float]:
    """The log probability of each token but the first, by the unsplit model."""
    logits = unsplit.model(torch.tensor([token_ids])).logits[0].float()
    found = logits[:-1].log_softmax(dim=-1).gather(1, torch.tensor(token_ids[1:]).unsqueeze(1))
    return [float(each) for each in found.squeeze(1)]


@torch.inference_mode()
def true_states(unsplit: Unsplit, token_ids: Sequence[int]) -> torch.Tensor:
    """`[T, H]`: the last hidden states after the final norm, by the unsplit model."""
    states: torch.Tensor = unsplit.model.model(torch.tensor([token_ids])).last_hidden_state[0].float()
    return states


async def test_an_echoed_prompt_has_the_log_probabilities_of_the_unsplit_model(swarm: Swarm, unsplit: Unsplit) -> None:
    async with swarm.connect() as client:
        plain = await client.generate(TEXT, max_tokens=4, ignore_eos=True)
        # A second time, most of the prompt is cached: it is computed nevertheless.
        for max_tokens, n in ((0, 1), (4, 1), (4, 2)):
            found = await client.generate(TEXT, max_tokens=max_tokens, ignore_eos=True, logprobs=2, echo=True, n=n)
            assert found.prompt is not None
            assert found.prompt.text == TEXT
            assert found.token_ids == plain.token_ids[:max_tokens]
            expected = true_logprobs(unsplit, found.prompt.token_ids)
            assert [each.token_id for each in found.prompt.logprobs] == list(found.prompt.token_ids[1:])
            assert [each.logprob for each in found.prompt.logprobs] == pytest.approx(expected, abs=1e-4)
            assert all(len(each.top) == 2 for each in found.prompt.logprobs)
            assert found.usage.cached_tokens == 0
        unscored = await client.generate(TEXT, max_tokens=1, echo=True)
        assert unscored.prompt is not None
        assert not unscored.prompt.logprobs
    await swarm.until_empty()


async def test_a_continuation_is_scored_where_the_tokens_divide_it(swarm: Swarm, unsplit: Unsplit) -> None:
    async with swarm.connect() as client:
        before = (await client.tokenize(TEXT)).token_ids
        whole = (await client.tokenize(TEXT + CONTINUATION)).token_ids
        expected = true_logprobs(unsplit, whole)[len(before) - 1 :]
        for _ in range(2):
            found = await client.score(TEXT, CONTINUATION, logprobs=1)
            assert [each.logprob for each in found.logprobs] == pytest.approx(expected, abs=1e-4)
            assert found.logprob == pytest.approx(math.fsum(expected), abs=1e-4)
        # What precedes the continuation may come from the cache.
        assert found.usage.cached_tokens > 0
        assert (await client.score(before, whole[len(before) :])).logprob == pytest.approx(found.logprob, abs=1e-4)
        answer = await client.generate(TEXT, max_tokens=3, ignore_eos=True)
        assert (await client.score(before, answer.token_ids)).is_greedy
        assert not (await client.score(before, [*answer.token_ids[:2], 5])).is_greedy
        alone = await client.score("", CONTINUATION)
        assert len(alone.logprobs) == len((await client.tokenize(CONTINUATION)).token_ids) - 1
        with pytest.raises(InvalidRequest, match="continuation"):
            await client.score("a", [1])


@pytest.mark.parametrize("hop", [pytest.param(0, marks=pytest.mark.full), 1])
async def test_a_hop_that_dies_in_a_prompt_changes_no_score(model: Path, tmp_path: Path, hop: int) -> None:
    client_settings = {"prefill_chunk_tokens": 16, "recovery_patience_s": 30.0}
    spans = ["0:2", "2:5", "0:2", "2:5"]
    async with Swarm(tmp_path, model, spans, client=client_settings) as swarm, swarm.connect() as client:
        expected = await client.generate(TEXT, max_tokens=2, ignore_eos=True, logprobs=1, echo=True)
        pooled = await client.embed(TEXT)
        assert expected.prompt is not None
        deaths: list[list[float]] = []
        # The first of the two servers that gets so far dies; the other one takes its part.
        for server in swarm.servers[hop::2]:
            deaths.append(doom(swarm, server, lambda rows: not any(deaths) and beyond(60)(rows)))
        calls = (
            client.generate(TEXT, max_tokens=2, ignore_eos=True, logprobs=1, echo=True, cache_salt="other"),
            client.score("the", TEXT),
            client.embed(TEXT),
        )
        found, score, again = await asyncio.gather(*calls)
        assert any(deaths)
        assert found.usage.recoveries + score.usage.recoveries + again.usage.recoveries > 0
        assert found.token_ids == expected.token_ids
        assert found.prompt is not None
        assert [each.token_id for each in found.prompt.logprobs] == [each.token_id for each in expected.prompt.logprobs]
        assert [each.logprob for each in found.prompt.logprobs] == pytest.approx(
            [each.logprob for each in expected.prompt.logprobs], abs=1e-5
        )
        assert again.vector == pytest.approx(pooled.vector, abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_an_embedding_is_that_of_the_unsplit_model(swarm: Swarm, unsplit: Unsplit, pooling: str) -> None:
    async with swarm.connect() as client:
        token_ids = (await client.tokenize(TEXT)).token_ids
        states = true_states(unsplit, token_ids)
        expected = states.mean(dim=0) if pooling == "mean" else states[-1]
        found = await client.embed(TEXT, pooling=pooling)
        assert list(found.vector) == pytest.approx((expected / expected.norm()).tolist(), abs=1e-5)
        raw = await client.embed(token_ids, pooling=pooling, normalise=False)
        assert list(raw.vector) == pytest.approx(expected.tolist(), abs=1e-4)
        short = await client.embed(TEXT, pooling=pooling, dimensions=8)
        assert list(short.vector) == pytest.approx((expected[:8] / expected[:8].norm()).tolist(), abs=1e-5)
        with pytest.raises(InvalidRequest, match="dimensions"):
            await client.embed(TEXT, dimensions=100_000)


@pytest.mark.parametrize(
    "options, field",
    [({"session": "0" * 32}, "echo"), ({"request_id": "a"}, "echo"), ({"logprobs": 21}, "logprobs")],
)
async def test_an_echo_that_cannot_be_is_refused(swarm: Swarm, options: dict[str, Any], field: str) -> None:
    async with swarm.connect() as client:
        with pytest.raises(InvalidRequest, match=field):
            await client.generate("a", max_tokens=0, echo=True, **options)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await client.generate("a", max_tokens=0)


async def test_the_whole_context_can_be_scored(swarm: Swarm, unsplit: Unsplit) -> None:
    token_ids = [3 + index % 40 for index in range(1024)]
    async with swarm.connect() as client:
        found = await client.score((), token_ids)
        assert found.logprob == pytest.approx(math.fsum(true_logprobs(unsplit, token_ids)), rel=1e-5)
        with pytest.raises(InvalidRequest, match="maximum context length is 1024 tokens"):
            await client.score(token_ids, [1])
