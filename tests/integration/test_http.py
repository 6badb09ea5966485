"""OpenAI's dialect over HTTP: the same answers as over gRPC, errors in its form, and nothing left of who has gone."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from corolla.client.service import ClientBounds
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "Who is the thin man?"}]


swarm = tiny_swarm(
    ["0:2", "2:5"],
    client={"http_port": 0, "max_request_bytes": 64 << 10},
    bounds=ClientBounds(http_read_timeout_s=1.0),
)


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
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    streamed = await http.post("/v1/chat/completions", json={**body, **options})
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
        await http.post("/v1/completions", json=body, timeout=httpx2.Timeout(60, read=0.05))
    await swarm.until_empty()


async def test_chosen_tokens_have_their_log_probabilities(http: httpx2.AsyncClient) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **GREEDY}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 3
    assert all(each["token"] == each["top_logprobs"][0]["token"] for each in entries)
    assert [len(each["top_logprobs"]) for each in entries] == [2, 2, 2]
    streamed = events_of((await http.post("/v1/chat/completions", json={**body, "stream": True})).text)
    found = [each["choices"][0]["logprobs"] for each in streamed]
    assert [entry for each in found if each for entry in each["content"]] == entries
    legacy = {"prompt": "the", "max_tokens": 3, "logprobs": 1, **GREEDY}
    (old,) = (await http.post("/v1/completions", json=legacy)).json()["choices"]
    assert len(old["logprobs"]["tokens"]) == len(old["logprobs"]["text_offset"]) == 3


async def test_what_nobody_sets_is_sampled_and_a_seed_repeats_it(http: httpx2.AsyncClient) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}

    async def tokens(**more: Any) -> Any:
        return (await http.post("/v1/completions", json={**body, **more})).json()["choices"][0]["token_ids"]

    assert await tokens(seed=3) == await tokens(seed=3)
    assert await tokens(seed=3) == await tokens(seed=3, temperature=1)
    assert await tokens(seed=3) != await tokens(temperature=0)
    three = (await http.post("/v1/completions", json={**body, "seed": 3, "n": 3})).json()["choices"]
    assert [each["index"] for each in three] == [0, 1, 2]
    assert three[0]["token_ids"] == await tokens(seed=3)


async def test_a_named_answer_goes_on_where_its_stream_broke(http: httpx2.AsyncClient) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 12, "request_id": "mine-1", **GREEDY}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
    rest = {**body, "resume_from": 5, "received": whole[:5]}
    assert (await http.post("/v1/completions", json=rest)).json()["choices"][0]["token_ids"] == whole[5:]


async def test_a_session_goes_on(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    session = (await http.post("/v1/sessions")).json()
    body = {"messages": CHAT, "max_tokens": 6, "session_id": session["id"], **GREEDY}
    first = (await http.post("/v1/chat/completions", json=body)).json()
    again = (await http.post("/v1/chat/completions", json=body)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
    assert (await http.get(f"/v1/sessions/{session['id']}")).json()["num_turns"] == 2
    assert (await http.delete(f"/v1/sessions/{session['id']}")).json()["deleted"]
    gone = await http.post("/v1/chat/completions", json=body)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")
    await swarm.until_empty()


async def test_a_response_is_a_turn_that_the_next_one_continues(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    body = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
    first = (await http.post("/v1/responses", json={**body, "input": "hello"})).json()
    assert first["output"][0]["content"][0]["type"] == "output_text"
    asked = {**body, "input": [{"role": "user", "content": "more"}], "previous_response_id": first["id"]}
    second = (await http.post("/v1/responses", json=asked)).json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert second["previous_response_id"] == first["id"]
    branch = (await http.post("/v1/responses", json=asked)).json()
    twin = (await http.post("/v1/responses", json={**asked, "store": False})).json()
    assert twin["output"][0]["content"] == branch["output"][0]["content"]
    assert branch["previous_response_id"] == first["id"]
    assert branch["id"][:37] != second["id"][:37]
    for each in (first, second, branch):
        read = (await http.get(f"/v1/responses/{each['id']}")).json()
        assert read | {"usage": None} == each | {"usage": None}
        assert read["usage"]["total_tokens"] == each["usage"]["total_tokens"]
        replay = await http.get(f"/v1/responses/{each['id']}", params={"stream": "true", "starting_after": 1})
        events = [json.loads(text.partition("\ndata: ")[2]) for text in replay.text.split("\n\n") if text]
        assert [events[0]["type"], events[-1]["response"]] == ["response.output_item.added", read]
    listed = await http.get(f"/v1/responses/{branch['id']}/input_items", params={"limit": 2, "order": "asc"})
    texts = [each["content"][0]["text"] for each in listed.json()["data"]]
    assert (texts, listed.json()["has_more"]) == (["hello", first["output"][0]["content"][0]["text"]], True)
    for query, param in (({"limit": 101}, "limit"), ({"order": "up"}, "order"), ({"after": "no"}, "after")):
        wrong = await http.get(f"/v1/responses/{first['id']}/input_items", params=query)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
    cut = await http.post("/v1/responses", json={**asked, "max_output_tokens": 1, "store": False})
    assert cut.json()["output"][-1]["status"] == "incomplete"
    assert (await http.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
    assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 404
    assert (await http.post("/v1/responses", json=asked)).status_code == 404
    following = {**asked, "previous_response_id": second["id"]}
    assert (await http.post("/v1/responses", json=following)).status_code == 200
    assert (await http.delete(f"/v1/responses/{branch['id']}")).json()["deleted"]
    unknown = await http.post("/v1/responses", json={**asked, "previous_response_id": "resp_1"})
    assert unknown.status_code == 404
    unstored = (await http.post("/v1/responses", json={**body, "input": "hello", "store": False})).json()
    assert unstored["output"][0]["content"] == first["output"][0]["content"]
    assert (await http.post("/v1/responses", json={**following, "store": False})).status_code == 200
    gone = await http.delete(f"/v1/sessions/{second['id'].removeprefix('resp_')[:32]}")
    assert gone.json().get("deleted"), gone.text
    await swarm.until_empty()


async def test_a_response_is_streamed_by_its_events(swarm: Swarm, http: httpx2.AsyncClient) -> None:
    body = {"input": "hello", "temperature": 0, "max_output_tokens": 8, "store": False}
    whole = (await http.post("/v1/responses", json=body)).json()
    text = (await http.post("/v1/responses", json={**body, "stream": True})).text
    found = [json.loads(each.partition("\ndata: ")[2]) for each in text.split("\n\n") if each]
    kinds = [each["type"] for each in found]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] == f"response.{whole['status']}"
    numbers = [each["sequence_number"] for each in found]
    assert numbers == sorted(set(numbers))
    streamed_text = "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    assert (
        streamed_text
        == whole["output"][0]["content"][0]["text"]
        == found[-1]["response"]["output"][0]["content"][0]["text"]
    )
    failed = await http.post("/v1/responses", json={"input": "hello " * 9000, "stream": True})
    assert (failed.status_code, failed.json()["error"]["code"]) == (400, "context_length_exceeded")
    await swarm.until_empty()


async def test_texts_become_tokens_and_texts_again(http: httpx2.AsyncClient) -> None:
    found = (await http.post("/tokenize", json={"prompt": "the thin", "return_token_strs": True})).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    body = {"tokens": found["tokens"], "skip_special_tokens": True}
    assert (await http.post("/detokenize", json=body)).json() == {"prompt": "the thin"}
    chat = (await http.post("/tokenize", json={"messages": CHAT})).json()
    assert chat["count"] > found["count"]


PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/chat/completions", {"messages": CHAT, "min_tokens": 1}, "min_tokens"),
        ("/v1/chat/completions", {"messages": PICTURE}, "messages[0].content[0]"),
        ("/v1/completions", {"prompt": "a", "n": 99}, "n"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "tools": [{"function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": CHAT, "guided_regex": "["}, "guided_regex"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1 << 20]}, "prompt[0]"),
        ("/v1/completions", {"prompt": ["a", "a"], "stream": True, "logit_bias": {"1": 101}}, "logit_bias"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [1 << 20]}, "tokens[0]"),
        ("/v1/responses", {"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ("/v1/responses", {"max_output_tokens": 1}, "input"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
async def test_a_refusal_names_the_field(http: httpx2.AsyncClient, path: str, body: Any, param: str) -> None:
    refused = await http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param, error


async def test_what_is_not_found_is_named_by_its_field(http: httpx2.AsyncClient) -> None:
    unknown = f"resp_{'0' * 40}"
    for reply, param in (
        (
            await http.post("/v1/responses", json={"input": "a", "previous_response_id": "resp_no"}),
            "previous_response_id",
        ),
        (
            await http.post("/v1/responses", json={"input": "a", "previous_response_id": unknown}),
            "previous_response_id",
        ),
        (await http.post("/v1/chat/completions", json={"messages": CHAT, "session_id": "no"}), "session_id"),
        (await http.post("/v1/responses", json={"input": "a", "model": "no"}), "model"),
        (await http.post("/v1/responses", json={"input": "a", "model": "tiny:no"}), "model"),
        (await http.get(f"/v1/responses/{unknown}"), "response_id"),
        (await http.get("/v1/sessions/no"), "session_id"),
    ):
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, param), reply.text


async def test_what_is_ignored_is_named(http: httpx2.AsyncClient) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "max_tokens": 2, "temprature": 1, "tools": [{"type": "web_search"}]}
    for body in (asked, {**asked, "stream": True}, {**asked, "n": 99}):
        reply = await http.post("/v1/chat/completions?api-version=1", json=body)
        assert reply.headers["x-corolla-ignored"] == "temprature, tools[0] (web_search), ?api-version"
    reply = await http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 2})
    assert "x-corolla-ignored" not in reply.headers
    reply = await http.get("/v1/models", params={"gr\u00f6\u00dfe": "1"})
    assert reply.headers["x-corolla-ignored"] == "?gr%C3%B6%C3%9Fe"


async def test_empty_texts_are_texts(http: httpx2.AsyncClient) -> None:
    empty = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
    for path, body in (
        ("/v1/chat/completions", {"messages": empty}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": None, "stop": ""}),
        ("/v1/completions", {"prompt": ["", "a"], "top_p": 0, "top_k": -1}),
        ("/v1/responses", {"input": "", "instructions": "", "store": False}),
    ):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        reply = await http.post(path, json={**body, limit: 2})
        assert reply.status_code == 200, reply.text


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}


@pytest.mark.parametrize("arguments", ['{"city":', '{"city": "Ro', "", " ", "null", "{}", "Rome", None])
async def test_any_call_of_an_answer_may_come_back(http: httpx2.AsyncClient, arguments: str | None) -> None:
    call = {**CALL, "index": 0, "function": {"name": "weather", "arguments": arguments, "parsed_arguments": None}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "parsed": None, "audio": None}
    messages = [*CHAT, answer, {"role": "tool", "tool_call_id": "call_1", "content": ""}]
    reply = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert reply.status_code == 200, reply.text
    item = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": arguments or ""}
    heard = {"type": "function_call_output", "call_id": "call_1", "output": ""}
    body = {"input": [{"role": "user", "content": "Where?"}, {**item, "status": "incomplete"}, heard]}
    reply = await http.post("/v1/responses", json={**body, "max_output_tokens": 2, "store": False})
    assert reply.status_code == 200, reply.text


async def test_every_failure_has_the_same_form(http: httpx2.AsyncClient) -> None:
    for reply, status, code in (
        (await http.get("/v1/nothing"), 404, "not_found"),
        (await http.get("/v1/completions"), 405, "method_not_allowed"),
        (await http.post("/v1/completions", content=b"{"), 400, "malformed_message"),
        (await http.post("/v1/completions", content=b"{", headers=JSON), 400, "malformed_message"),
        (await http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 400, None),
        (await http.post("/v1/completions", content=b'{"prompt": "a"}'), 400, "malformed_message"),
        (await http.get("/v1/models", headers={"origin": "https://elsewhere.example"}), 400, "invalid_request"),
        (await http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"}), 400, None),
        (await http.post("/v1/completions", json={"prompt": "a", "model": "b"}), 404, "model_not_found"),
        (await http.post("/v1/completions", json={"prompt": "a" * (64 << 10)}), 413, "message_too_large"),
    ):
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (reply.status_code, error["code"]) == (status, code or error["code"])


async def test_without_keys_pages_of_other_hosts_are_refused(http: httpx2.AsyncClient) -> None:
    own = str(http.base_url).rstrip("/")
    body = {"prompt": "a", "max_tokens": 1}
    assert (await http.post("/v1/completions", json=body, headers={"origin": own})).status_code == 200
    for headers in ({"origin": "https://elsewhere.example"}, {"origin": "null"}):
        refused = await http.post("/v1/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "origin")
    local = {"origin": "http://localhost:3000"}
    assert (await http.options("/v1/completions", headers=local)).status_code == 204
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("GET", "/"), ("POST", "/v1/completions")):
        given: dict[str, Any] = {"json": body} if method == "POST" else {}
        reply = await http.request(method, path, headers=local, **given)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, local["origin"])
        # A name of somebody else may lead here as well, and its pages are then this service's own to a browser.
        refused = await http.request(method, path, headers={"host": "elsewhere.example"}, **given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "host")


async def reply_to(swarm: Swarm, said: bytes) -> bytes:
    """All that comes on a connection on which this is said, until the other end closes it; it must, soon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", swarm.clients[0].http_port)
    writer.write(said)
    async with asyncio.timeout(10):
        found = await reader.read()
    writer.close()
    return found


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


async def test_heads_and_bodies_that_do_not_come_are_not_waited_for(swarm: Swarm) -> None:
    half_body = HEAD + b"content-length: 100\r\n\r\n{"
    silent, half_head, reply = await asyncio.gather(*(reply_to(swarm, said) for said in (b"", HEAD, half_body)))
    assert silent == half_head == b""
    assert b" 504 " in reply.partition(b"\r\n")[0]


async def test_a_body_without_a_length_is_counted_as_it_comes(swarm: Swarm) -> None:
    chunks = (b"1000\r\n" + b" " * 0x1000 + b"\r\n") * 100
    assert (await reply_to(swarm, HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)).startswith(b"HTTP/1.1 413 ")
