"""What browsers, proxies and programs expect of an HTTP service: origins, methods, paths, names, errors, patience."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from corolla.client.held_bytes import HeldBytes
from corolla.http.exchange import Limits
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint
from tests.integration.gates import held_up
from tests.integration.swarm import Swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

END_TOKEN = 1

KEY = "a-simple-key-of-bob"
PAGE = "https://chat.example.org"
CHAT = [{"role": "user", "content": "Who is the thin man?"}]
PART = "messages[0].content[0].text"
UNKNOWN = "<unknown>"
"""A token that the tokenizer has, and the model does not."""
NAMES = {"served_model_name": "house-model, gpt-4o-mini", "http_origins": f"{PAGE}, http://localhost:3000"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder: Path = tmp_path_factory.mktemp("callers")
    (folder / "keys").write_text(f"bob:{KEY}\n")
    model = make_tiny_checkpoint("llama", folder / "tiny", config_changes={"max_position_embeddings": 512})
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<added-{number}>" for number in range(VOCAB_SIZE - len(tokenizer))])
    tokenizer.add_tokens([UNKNOWN])
    tokenizer.save_pretrained(model)
    async with Swarm(folder, model, ["0:2", "2:5"], client={"http_port": 0, **NAMES}) as swarm:
        await swarm.add_client(api_keys_file=folder / "keys")
        yield swarm


def caller(swarm: Swarm, number: int = 0) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {KEY}"} if number else {}
    url = f"http://127.0.0.1:{swarm.clients[number].http_port}"
    return httpx2.AsyncClient(base_url=url, timeout=60, headers=headers)


@pytest.mark.parametrize("number", [0, 1])
async def test_pages_of_allowed_origins_ask_first_and_read_the_replies(swarm: Swarm, number: int) -> None:
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    async with caller(swarm, number) as http:
        # A preflight never has a key.
        preflight = await http.options("/v1/chat/completions", headers={**asked, "authorization": ""})
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        body = {"messages": CHAT, "max_tokens": 2}
        for path, given in (
            ("/v1/chat/completions", body),
            ("/v1/chat/completions", {**body, "stream": True}),
            ("/v1/chat/completions", {**body, "max_tokens": 10_000}),
            ("/v1/nothing", {}),
        ):
            reply = await http.post(path, json=given, headers={"origin": PAGE})
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            assert reply.headers["vary"] == "origin"
        if number:
            refused = await http.get("/v1/models", headers={"origin": PAGE, "authorization": ""})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("number", [0, 1])
async def test_pages_of_other_origins_read_nothing(swarm: Swarm, number: int) -> None:
    async with caller(swarm, number) as http:
        for origin in ("https://elsewhere.example", "https://chat.example.org.elsewhere.example", "null"):
            headers = {"origin": origin, "access-control-request-method": "POST"}
            assert (await http.options("/v1/completions", headers=headers)).status_code == 405
            reply = await http.get("/v1/models", headers={"origin": origin})
            assert "access-control-allow-origin" not in reply.headers
            assert reply.status_code == (200 if number else 400)
        # The placement is for the service's own page only.
        own = await http.get("/v1/placement", headers={"origin": PAGE}) if not number else None
        assert own is None or (own.status_code, "access-control-allow-origin" in own.headers) == (400, False)


async def test_paths_are_found_as_programs_write_them(http: httpx2.AsyncClient) -> None:
    body = {"messages": CHAT, "max_tokens": 2, "temperature": 0}
    expected = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    for path in ("/chat/completions", "/v1/chat/completions/", "/chat/completions/", "/v1/v1/chat/completions"):
        assert (await http.post(path, json=body)).json()["choices"] == expected
    for path in ("/v1/models/", "/models", "/v1/models/house-model/", "/health/", "/"):
        found = await http.get(path)
        head = await http.head(path)
        assert (head.status_code, head.content) == (found.status_code, b"") == (200, b"")
        assert head.headers["content-length"] == str(len(found.content))
    assert (await http.head("/v1/chat/completions")).status_code == 405


async def test_the_model_has_the_names_that_its_user_chose(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    listed = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
    assert listed == ["house-model", "gpt-4o-mini"]
    for name in ("house-model", "gpt-4o-mini", "tiny", ""):
        body = {"prompt": "a", "max_tokens": 1, **({"model": name} if name else {})}
        assert (await http.post("/v1/completions", json=body)).json()["model"] == "house-model"
    unknown = await http.post("/v1/completions", json={"prompt": "a", "model": "demo"})
    assert unknown.status_code == 404
    assert "house-model, gpt-4o-mini" in unknown.json()["error"]["message"]
    session = (await http.post("/v1/sessions", json={"model": "gpt-4o-mini"})).json()
    assert session["model"] == "house-model"
    async with swarm.connect() as client:
        assert [each.name for each in await client.models()] == listed


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": [1] * 600}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 6000}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 512, "max_tokens": 1}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 3000}]}, "messages"),
        ("/v1/responses", {"input": "a " * 3000, "store": False}, "input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_programs_recognise_a_context_that_is_too_short(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    refused = await http.post(path, json={**body, "stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 512 tokens.")


async def test_an_answer_that_may_cross_the_context_ends_there(http: httpx2.AsyncClient) -> None:
    asked = {"prompt": [1] * 500, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    free = (await http.post("/v1/completions", json=asked)).json()["choices"][0]
    assert (len(free["token_ids"]), free["finish_reason"]) == (12, "length")
    for max_tokens in (13, 2**31 - 1):
        limited = (await http.post("/v1/completions", json={**asked, "max_tokens": max_tokens})).json()["choices"][0]
        assert (limited["token_ids"], limited["finish_reason"]) == (free["token_ids"], "length")
    chat = {"messages": CHAT, "ignore_eos": True, "max_completion_tokens": 32_000, "stream": True}
    streamed = (await http.post("/v1/chat/completions", json=chat)).text
    assert '"finish_reason":"length"' in streamed
    unfinished = {"input": "a", "max_output_tokens": 999, "store": False, "logit_bias": {str(END_TOKEN): -100}}
    response = (await http.post("/v1/responses", json=unfinished)).json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": f"a{UNKNOWN}", "max_tokens": 1}, "prompt"),
        ("/v1/completions", {"prompt": UNKNOWN, "echo": True, "max_tokens": 0, "logprobs": 1}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": UNKNOWN}]}, "messages"),
        ("/v1/responses", {"input": UNKNOWN}, "input"),
        ("/v1/embeddings", {"input": UNKNOWN}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["a", UNKNOWN]}, "documents[1]"),
        ("/v1/rerank", {"query": UNKNOWN, "documents": [{"text": "a"}]}, "documents[0].text"),
        ("/v1/completions", {"prompt": ["a", UNKNOWN], "max_tokens": 1}, "prompt[1]"),
    ],
)
async def test_a_text_with_a_token_that_the_model_does_not_know_is_refused_by_its_field(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    refused = await http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert error["message"] == f"{param}: has the token {VOCAB_SIZE}; the model knows {VOCAB_SIZE} tokens"


async def test_a_form_is_spelled_without_tokens_that_the_model_does_not_know(http: httpx2.AsyncClient) -> None:
    body = {"prompt": "a", "guided_choice": [UNKNOWN], "max_tokens": 20}
    assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == UNKNOWN


@pytest.mark.parametrize(
    "content, param, said",
    [
        (b'{"prompt": "a",}', "body", "line 1 column"),
        (b"", "body", "line 1 column"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "must be a text or a list"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}', PART, ""),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop": 5}', "stop", ""),
        (b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": 5}', "tool_choice", ""),
        (b'{"messages": [{"content": "a"}]}', "messages[0].role", "must be set"),
    ],
)
async def test_an_error_says_where_it_is_in_the_callers_words(
    http: httpx2.AsyncClient, content: bytes, param: str, said: str
) -> None:
    refused = await http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_a_stream_begins_before_its_first_token(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    begun_s = time.monotonic()
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True, "stream": True}
    with held_up(swarm.servers[0]):
        stream = http.stream("POST", "/v1/completions", json=body)
        reply = await asyncio.wait_for(stream.__aenter__(), 20)
        waited_s = time.monotonic() - begun_s
    lines = [line async for line in reply.aiter_lines() if line]
    await stream.__aexit__(None, None, None)
    assert waited_s >= Limits(0, HeldBytes(0), 0, 0).headers_after_s
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert lines[-1] == "data: [DONE]"
    assert len([json.loads(line[6:]) for line in lines[:-1] if line.startswith("data: ")]) >= 1


async def test_a_response_repeats_what_its_caller_sent(http: httpx2.AsyncClient) -> None:
    body = {"input": "a", "max_output_tokens": 1, "store": False, "user": 0, "metadata": {"run": 7}}
    for stream in (False, True):
        reply = await http.post("/v1/responses", json={**body, "stream": stream})
        assert reply.status_code == 200
        assert '"user":0' in reply.text
        assert '"metadata":{"run":7}' in reply.text
