"""HTTP lets in the same callers as gRPC, within the same bounds, and leaves the same traces: it is the same path."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from corolla.chassis import audit
from corolla.client.api.keys import NewKey, Scope
from corolla.client.service import ClientService
from corolla.http.openapi import OPERATIONS
from corolla.trust.workload import Role
from tests.checkpoints import make_tiny_checkpoint
from tests.identities import Identities
from tests.integration.metrics import sample, until_sample
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = NewKey("acme", scopes=[Scope.GENERATE])
SIMPLE = "a-simple-key-of-bob"
HASTY = "a-simple-key-of-hasty"
JSON = {"content-type": "application/json"}
CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 3000, "temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder: Path = tmp_path_factory.mktemp("endpoints")
    (folder / "keys").write_text(f"{KEY.record.line}\nbob:{SIMPLE}\nhasty:{HASTY}\n")
    quotas = {"tenants": {"acme": {"running_sequences": 2}, "hasty": {"requests_per_second": 1}}}
    (folder / "quotas.json").write_text(json.dumps(quotas))
    Identities(folder).folder_of(Role.CLIENT, "public")
    model = make_tiny_checkpoint("llama", folder / "tiny", config_changes={"max_position_embeddings": 4096})
    client = {"http_port": 0, "api_keys_file": folder / "keys", "quotas_file": folder / "quotas.json"}
    async with Swarm(folder, model, ["0:2", "2:5"], client=client, api_key=SIMPLE) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def public(swarm: Swarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate that callers are shown."""
    return Identities(tmp_path_factory.mktemp("public")).folder_of(Role.CLIENT, "public")


def caller(service: ClientService, key: str = SIMPLE, **options: Any) -> httpx2.AsyncClient:
    scheme = "https" if "verify" in options else "http"
    return httpx2.AsyncClient(
        base_url=f"{scheme}://127.0.0.1:{service.http_port}",
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
        **options,
    )


async def test_a_stranger_is_refused_before_the_body_is_read(swarm: Swarm) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", swarm.clients[0].http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    writer.close()
    async with caller(swarm.clients[0], "nobody's") as http:
        for reply in (await http.get("/v1/models"), await http.post(COMPLETIONS, json=LONG)):
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await http.get("/health")).status_code == 200


async def test_scopes_sessions_and_quotas_are_those_of_grpc(swarm: Swarm) -> None:
    async with swarm.connect() as client:
        session_id = (await client.create_session()).session_id
    async with caller(swarm.clients[0], KEY.key) as http:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await http.post(CHATS, json=body)).json()["error"]["code"] == "scope_denied"
        foreign = await http.post(COMPLETIONS, json={**LONG, "session_id": session_id, "max_tokens": 1})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "session_not_found")
        refused = await http.post(COMPLETIONS, json={**LONG, "max_tokens": 1, "n": 3})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await http.post(COMPLETIONS, json={**LONG, "max_tokens": 1, "n": 2})).status_code == 200


async def test_messages_are_let_in_counted_and_refused_as_other_requests(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, audit.LOGGER)
    url, body = f"{swarm.url}/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    async with httpx2.AsyncClient(timeout=60) as http:
        for headers, status, kind in (
            ({"x-api-key": SIMPLE}, 200, None),
            ({"authorization": f"Bearer {SIMPLE}", "x-api-key": "nobody's"}, 200, None),
            ({}, 401, "authentication_error"),
            ({"x-api-key": "nobody's"}, 401, "authentication_error"),
            ({"x-api-key": KEY.key}, 403, "permission_error"),
        ):
            reply = await http.post(url, json=body, headers=headers)
            assert (reply.status_code, reply.json().get("error", {}).get("type")) == (status, kind)
            assert reply.headers["request-id"] == reply.headers["x-request-id"]
        counted = await http.post(f"{url}/count_tokens", json=body, headers={"x-api-key": SIMPLE})
        usage = (await http.post(url, json=body, headers={"x-api-key": SIMPLE})).json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    facts = [vars(each) for each in caplog.records if vars(each).get("method") == "POST /v1/messages"]
    assert [each["outcome"] for each in facts] == ["OK", "OK", *["UNAUTHENTICATED"] * 2, "SCOPE_DENIED", "OK"]
    assert (facts[0]["tenant"], facts[0]["generated_tokens"]) == ("bob", 2)
    served = {"route": "POST /v1/messages", "status": "200"}
    assert await sample(swarm.clients[0].metrics_port, "corolla_http_requests_total", **served) == 3


async def test_a_response_and_the_session_made_for_it_are_one_request(swarm: Swarm) -> None:
    async with caller(swarm.clients[0], HASTY) as http:
        reply = await http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1})
        assert reply.status_code == 200, reply.json()
        session_id = reply.json()["id"].removeprefix("resp_")[:32]
        assert (await http.delete(f"/v1/sessions/{session_id}")).is_success


async def test_requests_are_counted_and_audited(swarm: Swarm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, audit.LOGGER)
    service = swarm.clients[0]
    labels = {"route": f"POST {COMPLETIONS}", "status": "200", "fault": "none"}
    before = await sample(service.metrics_port, "corolla_http_requests_total", **labels)
    async with caller(service) as http:
        body = {**LONG, "prompt": [[1, 2], [3]], "max_tokens": 4}
        replies = [await http.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"})]
        replies.append(await http.post(COMPLETIONS, json=body))
    assert await sample(service.metrics_port, "corolla_http_requests_total", **labels) == before + 2
    facts = [vars(each) for each in caplog.records if vars(each).get("method") == labels["route"]]
    assert [(each["outcome"], each["tenant"]) for each in facts] == [("OK", "bob")] * 2
    assert (facts[0]["prompt_tokens"], facts[0]["generated_tokens"]) == (3, 8)
    # The log has the name that the reply has, whether the caller or the service gave it.
    assert facts[0]["x_request_id"] == "mine"
    assert [each["x_request_id"] for each in facts] == [each.headers["x-request-id"] for each in replies]


async def test_each_request_of_each_endpoint_ends_in_one_series(swarm: Swarm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, audit.LOGGER)
    service = swarm.clients[0]
    total = "corolla_http_requests_total"
    odd = (
        {"route": "unknown path", "status": "404"}, {"route": "unknown path", "status": "400"},
        {"route": f"other {CHATS}", "status": "405"},
    )  # fmt: skip
    before, num_requests, num_audited = await sample(service.metrics_port, total), 0, 0
    before_odd = [await sample(service.metrics_port, total, **each) for each in odd]
    async with caller(service) as http:
        for operation in OPERATIONS:
            path = operation.path.replace("{", "").replace("}", "")
            allowed = {each.method for each in OPERATIONS if each.path == operation.path} | {"OPTIONS"}
            other = next(each for each in ("PUT", "PATCH") if each not in allowed)
            for method, headers, content in (
                (operation.method, {}, b"{"),
                (operation.method, {"authorization": "none"}, b""),
                (other, {}, b""),
                ("OPTIONS", {"origin": "http://a"}, b""),
            ):
                await http.request(method, path, headers={**JSON, **headers}, content=content)
            num_requests += 4
            # Open operations are in no audit log.
            num_audited += 0 if operation.is_open else 2
        await http.get("/v1/nothing")
        await http.request("INVENTED", "/v1/nothing")
    reader, writer = await asyncio.open_connection("127.0.0.1", service.http_port)
    writer.write(b"GARBAGE\r\n\r\n")
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()
    assert await sample(service.metrics_port, total) == before + num_requests + 3
    after_odd = [await sample(service.metrics_port, total, **each) for each in odd]
    assert [after - was for after, was in zip(after_odd, before_odd, strict=True)] == [2, 1, 2]
    assert len([each for each in caplog.records if each.name == audit.LOGGER]) == num_audited


async def test_a_refused_stranger_does_not_keep_its_connection(swarm: Swarm) -> None:
    guarded = [(each.method, each.path) for each in OPERATIONS if not each.is_open]
    asked = [("PUT", "/health"), ("GET", "/nothing"), ("OPTIONS", COMPLETIONS), ("PUT", COMPLETIONS), *guarded]
    for method, path in asked:
        reader, writer = await asyncio.open_connection("127.0.0.1", swarm.clients[0].http_port)
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        async with asyncio.timeout(10):
            reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 40"), (method, path)
        writer.close()


async def test_requests_without_an_answer_are_no_answers(swarm: Swarm) -> None:
    service = swarm.clients[0]
    names = ("corolla_request_success_total", "corolla_e2e_request_latency_seconds_count", "corolla_readings_total")
    before = [await sample(service.metrics_port, name) for name in names]
    async with caller(service) as http:
        for path, body in (
            ("/v1/embeddings", {"input": ["a", "b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
            (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}),
            (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 1, "n": 2}),
        ):
            assert (await http.post(path, json=body)).status_code == 200
    assert [await sample(service.metrics_port, name) for name in names] == [before[0] + 2, before[1] + 2, before[2] + 6]


async def test_who_leaves_is_counted_as_gone_and_leaves_nothing(swarm: Swarm) -> None:
    service = swarm.clients[0]
    async with caller(service) as http, http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        assert await sample(service.metrics_port, "corolla_http_open_streams") == 1
    await swarm.until_empty()
    gone = {"status": "499", "fault": "caller"}
    await until_sample(service.metrics_port, "corolla_http_requests_total", lambda count: count >= 1, **gone)
    assert await sample(service.metrics_port, "corolla_http_open_streams") == 0
    assert await sample(service.metrics_port, "corolla_request_success_total", finished_reason="abort") == 1


async def test_connections_are_bounded(swarm: Swarm) -> None:
    service = await swarm.add_client(max_connections=2)
    streams = [await asyncio.open_connection("127.0.0.1", service.http_port) for _ in range(3)]
    async with asyncio.timeout(5):
        answered = await streams[2][0].read()
    assert answered.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answered
    assert await sample(service.metrics_port, "corolla_http_refused_connections_total") == 1
    for _, writer in streams:
        writer.close()


async def test_handshakes_are_connections_too(swarm: Swarm, public: Path) -> None:
    service = await swarm.add_client(public_tls_dir=public, max_connections=2)
    silent = [await asyncio.open_connection("127.0.0.1", service.http_port) for _ in range(2)]
    reader, writer = await asyncio.open_connection("127.0.0.1", service.http_port)
    async with asyncio.timeout(5):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert await sample(service.metrics_port, "corolla_http_refused_connections_total") == 1
    for each in (*[writer for _, writer in silent], writer):
        each.close()
    context = ssl.create_default_context(cafile=str(public / "ca.crt"))

    async def is_served() -> bool:
        async with caller(service, verify=context) as http:
            try:
                return (await http.get("/health")).status_code == 200
            except httpx2.TransportError:
                return False

    await until(is_served)


async def test_a_service_that_stops_ends_its_streams_with_an_event(swarm: Swarm) -> None:
    service = await swarm.add_client()
    async with caller(service) as http, http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        swarm.clients.remove(service)
        stopping = asyncio.create_task(service.stop())
        rest = [line async for line in lines if line]
        await stopping
    assert rest[-2] == "event: error"
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "service_stopping"
    await swarm.until_empty()


async def test_the_public_certificate_is_shown_here_too(swarm: Swarm, public: Path) -> None:
    service = await swarm.add_client(public_tls_dir=public)
    context = ssl.create_default_context(cafile=str(public / "ca.crt"))
    async with caller(service, verify=context) as http:
        assert (await http.post(COMPLETIONS, json={**LONG, "max_tokens": 2})).status_code == 200
    older = ssl.create_default_context(cafile=str(public / "ca.crt"))
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    async with caller(service, verify=older) as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get("/health")
