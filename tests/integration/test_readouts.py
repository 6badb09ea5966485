"""What hops report about prompts: log probabilities and embeddings are those of the unsplit model."""

import asyncio
import base64
import json
import math
import struct
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
        # An answer leaves its prompt in the cache.
        await client.generate(TEXT, max_tokens=1)
        most_cached = 0
        # Each span has two servers: of four requests, at least one comes to servers that all had the text before.
        for _ in range(3):
            found = await client.score(TEXT, CONTINUATION, logprobs=1)
            assert [each.logprob for each in found.logprobs] == pytest.approx(expected, abs=1e-4)
            assert found.logprob == pytest.approx(math.fsum(expected), abs=1e-4)
            most_cached = max(most_cached, found.usage.cached_tokens)
        # What precedes the continuation may come from the cache.
        assert most_cached > 0
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


@pytest.mark.parametrize("pooling", ["mean", pytest.param("last", marks=pytest.mark.kind)])
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
    "options, field", [({"session": "0" * 32}, "echo"), ({"request_id": "a"}, "echo"), ({"logprobs": 21}, "logprobs")]
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


async def test_completions_echo_prompts_whole_and_streamed(http: httpx2.AsyncClient, unsplit: Unsplit) -> None:
    """The evaluation harness asks so: ids in lists, one new token, which it ignores."""
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "ignore_eos": True}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"]
    for choice, prompt in zip(whole, prompts, strict=True):
        facts = choice["logprobs"]
        assert facts["token_logprobs"][0] is None
        assert facts["token_logprobs"][1:-1] == pytest.approx(true_logprobs(unsplit, prompt), abs=1e-4)
        assert len(facts["tokens"]) == len(facts["top_logprobs"]) == len(facts["text_offset"]) == len(prompt) + 1
        assert choice["text"].startswith("".join(facts["tokens"][:-1]))
        chosen = zip(facts["tokens"][1:], facts["token_logprobs"][1:], facts["top_logprobs"][1:], strict=True)
        assert all(top[token] == logprob for token, logprob, top in chosen)
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for line in (await http.post("/v1/completions", json={**body, "stream": True})).text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            parts[choice["index"]].append(choice)
    for index, choice in enumerate(whole):
        found = [each["logprobs"] for each in parts[index] if each["logprobs"]]
        assert "".join(each["text"] for each in parts[index]) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert [value for each in found for value in each[name]] == choice["logprobs"][name]
    alone = {"prompt": "the thin man", "max_tokens": 0, "echo": True, "logprobs": 0, "n": 2}
    two = (await http.post("/v1/completions", json=alone)).json()
    assert [each["text"] for each in two["choices"]] == ["the thin man"] * 2
    assert two["usage"]["completion_tokens"] == 0
    assert (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})).status_code == 400


async def test_the_best_answers_are_chosen_from_many(http: httpx2.AsyncClient) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 6, "logprobs": 0, "seed": 5, "temperature": 1.5, "ignore_eos": True}
    every = (await http.post("/v1/completions", json={**body, "n": 4})).json()["choices"]
    means = sorted((sum(each["logprobs"]["token_logprobs"]) / 6 for each in every), reverse=True)
    best = (await http.post("/v1/completions", json={**body, "n": 2, "best_of": 4})).json()
    assert [each["index"] for each in best["choices"]] == [0, 1]
    found = [sum(each["logprobs"]["token_logprobs"]) / 6 for each in best["choices"]]
    assert found == pytest.approx(means[:2], abs=1e-4)
    assert best["usage"]["completion_tokens"] == 24
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}, {"best_of": 17}):
        refused = await http.post("/v1/completions", json={**body, **wrong})
        assert refused.status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", pytest.param("/v1/chat/completions", marks=pytest.mark.kind)])
async def test_each_event_of_a_stream_has_the_usage_if_it_is_wanted(http: httpx2.AsyncClient, path: str) -> None:
    asked = {"prompt": [1, 2, 3]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    lines = (await http.post(path, json=body)).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert events[-1]["choices"] == []
    assert all(each["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for each in events)


async def test_embeddings_come_as_numbers_and_as_bytes(http: httpx2.AsyncClient, unsplit: Unsplit) -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    found = (await http.post("/v1/embeddings", json={"model": "tiny", "input": prompts})).json()
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for each, prompt in zip(found["data"], prompts, strict=True):
        expected = true_states(unsplit, prompt).mean(dim=0)
        assert each["embedding"] == pytest.approx((expected / expected.norm()).tolist(), abs=1e-5)
    body = {"input": prompts[0], "encoding_format": "base64", "dimensions": 8, "pooling": "last"}
    (packed,) = (await http.post("/v1/embeddings", json=body)).json()["data"]
    vector = struct.unpack("<8f", base64.b64decode(packed["embedding"]))
    state = true_states(unsplit, prompts[0])[-1][:8]
    assert list(vector) == pytest.approx((state / state.norm()).tolist(), abs=1e-5)
    many = (await http.post("/v1/embeddings", json={"input": ["the thin man"] * 40})).json()["data"]
    assert len(many) == 40
    for wrong, param in (({"input": []}, "input"), ({"input": "a", "dimensions": 100_000}, "dimensions")):
        error = (await http.post("/v1/embeddings", json=wrong)).json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_documents_are_ordered_by_how_probable_the_query_is(http: httpx2.AsyncClient, unsplit: Unsplit) -> None:
    documents = ["the man in the tent", "an inner thing", "a thin net"]
    prompts = [f"Passage: {each}\nPlease write a question based on this passage.\nQuestion:" for each in documents]
    scores = []
    for prompt in prompts:
        before = unsplit.tokenizer(prompt)["input_ids"]
        whole = unsplit.tokenizer(f"{prompt} who is thin?")["input_ids"]
        logprobs = true_logprobs(unsplit, whole)[len(before) - 1 :]
        scores.append(math.exp(math.fsum(logprobs) / len(logprobs)))
    body = {"query": "who is thin?", "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    ranked = (await http.post("/v1/rerank", json=body)).json()["results"]
    assert [each["index"] for each in ranked] == sorted(range(3), key=lambda index: -scores[index])
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(scores, reverse=True), rel=1e-3)
    assert ranked[0]["document"] == {"text": documents[ranked[0]["index"]]}
    first = (await http.post("/v1/rerank", json={**body, "top_n": 1})).json()["results"]
    assert [each["document"] for each in first] == [ranked[0]["document"]]
    assert first[0]["relevance_score"] == pytest.approx(ranked[0]["relevance_score"], rel=1e-3)
    pairs = {"text_1": "who is thin?", "text_2": documents}
    found = (await http.post("/v1/score", json=pairs)).json()["data"]
    assert [each["score"] for each in found] == pytest.approx(scores, rel=1e-3)
    wrong = await http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": documents})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")


async def test_the_tokenizer_is_described_as_its_files_do(http: httpx2.AsyncClient, unsplit: Unsplit) -> None:
    facts = (await http.get("/tokenizer_info")).json()
    assert facts["eos_token"] == unsplit.tokenizer.eos_token
    assert facts["chat_template"] == unsplit.tokenizer.chat_template
