"""OpenAI's dialect over HTTP: the same answers as over gRPC, errors in its form, and nothing left of who has gone."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tests.checkpoints import make_tiny_checkpoint
from tests.integration.swarm import Swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "Who is the thin man?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder = tmp_path_factory.mktemp("http")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    async with Swarm(
        folder,
        model,
        ["0:2", "2:5"],
        client={"http_port": 0, "max_request_bytes": 64 << 10, "http_read_timeout_s": 1.0},
    ) as swarm:
        yield swarm


@pytest_asyncio.fixture(loop_scope="module")
async def http(swarm: Swarm) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{swarm.clients[0].http_port}", timeout=60) as http:
        yield http


def events_of(text: str) -> list[Any]:
    """The data of a stream's events; the last one must be `[DONE]`."""
    found = [each.removeprefix("data: ") for each in text.split("\n\n") if each]
    assert found[-1] == "[DONE]"
    return [json.loads(each) for each in found[:-1]]


async def test_models_are_listed(http: httpx2.AsyncClient) -> None:
    found = (await http.get("/v1/models")).json()
    assert (found["object"], [each["id"] for each in found["data"]]) == ("list", ["tiny"])
    assert (await http.get("/v1/models/tiny")).json() == found["data"][0]
    missing = await http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_chat_is_that_of_grpc_whole_and_streamed(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    async with swarm.connect() as client, client.chat() as chat:
        expected = await chat.send(CHAT[0]["content"], max_tokens=12, temperature=0)
    body = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_completion_tokens": 12}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    choice = whole["choices"][0]
    assert choice["message"]["content"] == expected.text
    assert whole["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert whole["usage"]["recoveries"] == 0
    wishes = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    streamed = await http.post("/v1/chat/completions", json={**body, **wishes})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events_of(streamed.text)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == expected.text
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


async def test_prompts_are_completed_as_over_grpc(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    async with swarm.connect() as client:
        expected = [
            (await client.generate(prompt, max_tokens=8, ignore_eos=True)).token_ids for prompt in ([1, 2, 3], [4, 5])
        ]
    body = {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 8, "return_token_ids": True, **GREEDY}
    whole = (await http.post("/v1/completions", json=body)).json()
    assert [tuple(each["token_ids"]) for each in whole["choices"]] == [tuple(each) for each in expected]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (5, 16)
    streamed = events_of((await http.post("/v1/completions", json={**body, "stream": True})).text)
    found: dict[int, list[int]] = {0: [], 1: []}
    for each in streamed:
        (choice,) = each["choices"]
        found[choice["index"]] += choice["token_ids"]
    assert [tuple(each) for each in found.values()] == [tuple(each) for each in expected]


async def test_a_caller_that_leaves_frees_its_pages(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 400, **GREEDY}
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        async for _ in stream.aiter_lines():
            break
    with pytest.raises(httpx2.ReadTimeout):
        await http.post("/v1/completions", json=body, timeout=0.05)
    await swarm.until_empty()
