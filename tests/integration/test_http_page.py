"""The page at `/` and what it watches: what is served to whom, and what of the servers a tenant may see."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from corolla.client.api.keys import NewKey
from corolla.client.service import ClientBounds, ClientService
from corolla.http.page import HEADERS
from corolla.http.placement_facts import name_of
from tests.integration.deaths import doom
from tests.integration.metrics import sample, until_sample
from tests.integration.swarm import Swarm, tiny_swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW_WATCHERS = ClientBounds(max_watchers=4)
KEY = "a-simple-key-of-bob"
ANNS_KEY = "a-simple-key-of-ann"
OTHER_MODEL = NewKey("acme", models=["another"])
PLACEMENT = "/v1/placement"
PROMPT = [5, 6, 7]


swarm = tiny_swarm(
    ["0:2", "2:5", "2:5"],
    context_length=4096,
    keys=f"{OTHER_MODEL.record.line}\nbob:{KEY}\n",
    client={"http_port": 0},
    api_key=KEY,
)


@asynccontextmanager
async def caller(service: ClientService, key: str = KEY, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
    url = f"http://127.0.0.1:{service.http_port}"
    given = {"authorization": f"Bearer {key}", **headers} if key else headers
    async with httpx2.AsyncClient(base_url=url, headers=given, timeout=60) as http:
        yield http


async def placements(http: httpx2.AsyncClient) -> AsyncGenerator[Any, None]:
    async with http.stream("GET", PLACEMENT) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_the_page_is_shown_to_everybody_and_lets_nothing_else_in(swarm: Swarm) -> None:
    async with caller(swarm.clients[0], key="") as http:
        for path, kind in (("/", "text/html"), ("/page/page.js", "text/javascript"), ("/page/style.css", "text/css")):
            reply = await http.get(path)
            assert (reply.status_code, reply.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            assert {name: reply.headers[name] for name in HEADERS} == HEADERS
        for path in ("/page/", "/page/index.html", "/page/..%2fpage.py", "/page/../page.py", "/page/nothing.js"):
            assert (await http.get(path)).status_code == 404
        assert (await http.post("/", json={})).status_code == 405


async def test_a_page_that_is_switched_off_is_not_there(swarm: Swarm) -> None:
    service = await swarm.add_client(http_page=False)
    async with caller(service) as http:
        for path in ("/", "/page/page.js", PLACEMENT):
            assert (await http.get(path)).status_code == 404
        assert PLACEMENT not in (await http.get("/openapi.json")).json()["paths"]


async def test_the_placement_is_for_who_has_a_key(swarm: Swarm) -> None:
    for key, status, code in (("", 401, "invalid_api_key"), (OTHER_MODEL.key, 403, "scope_denied")):
        async with caller(swarm.clients[0], key) as http:
            refused = await http.get(PLACEMENT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


async def test_a_tenant_sees_no_address(swarm: Swarm) -> None:
    async with caller(swarm.clients[0]) as http:
        seen = await anext(placements(http))
    assert (seen["model"], seen["num_blocks"], seen["uncovered"]) == ("tiny", 5, [])
    assert [each["blocks"] for each in seen["servers"]] == [[0, 2], [2, 5], [2, 5]]
    text = json.dumps(seen)
    for server in swarm.servers:
        assert server.address not in text
        assert str(server.port) not in text
        assert server.server_id not in text


@pytest.mark.kind
async def test_who_watches_learns_of_a_recovery_as_it_happens(swarm: Swarm) -> None:
    answer: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 700, "temperature": 0, "ignore_eos": True}
    async with caller(swarm.clients[0]) as http:
        expected = (await http.post("/v1/completions", json=answer)).json()["choices"][0]["text"]
        answering = asyncio.create_task(http.post("/v1/completions", json=answer))
        doomed: list[str] = []
        async for seen in placements(http):
            going = {each["name"] for each in seen["servers"] if each["answers"] and each["blocks"] == [2, 5]}
            if going and not doomed:
                doomed += [each.server_id for each in swarm.servers if name_of(each.server_id) in going]
                (server,) = [each for each in swarm.servers if each.server_id in doomed]
                doom(swarm, server, lambda rows: True)
            if seen["recoveries"]:
                break
        (recovery,) = seen["recoveries"]
        reply = (await answering).json()
    assert reply["choices"][0]["text"] == expected
    assert reply["usage"]["recoveries"] == recovery["answers"] == 1
    (moved,) = recovery["moved"]
    (spare,) = [each.server_id for each in swarm.servers[1:] if each.server_id not in doomed]
    assert (moved["blocks"], moved["lost"], moved["found"]) == ([2, 5], name_of(doomed[0]), name_of(spare))
    assert 0 < recovery["seconds"] < 30


async def test_decode_steps_tell_how_many_rows_they_have(swarm: Swarm) -> None:
    answer: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "n": 4}
    async with caller(swarm.clients[0]) as http:
        await http.post("/v1/completions", json=answer)
        async for seen in placements(http):
            first = seen["servers"][0]
            if first["batch_rows"] > 1:
                assert first["batch_rows"] <= 4
                assert first["step_seconds"] > 0
                break


async def test_as_many_watch_as_may_and_leave_nothing(swarm: Swarm) -> None:
    service = await swarm.add_client(bounds=FEW_WATCHERS)  # one of several tenants has a quarter
    async with caller(service) as http:
        watching = placements(http)
        await anext(watching)
        assert await sample(service.metrics_port, "corolla_http_watchers") == 1
        assert await sample(service.metrics_port, "corolla_http_open_streams") == 0
        refused = await http.get(PLACEMENT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        await watching.aclose()
        await until_sample(service.metrics_port, "corolla_http_watchers", lambda count: count == 0)
        await anext(placements(http))


async def test_a_tenant_that_is_not_alone_any_more_has_its_part(swarm: Swarm, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"bob:{KEY}\n")
    service = await swarm.add_client(bounds=FEW_WATCHERS, api_keys_file=keys)
    async with caller(service) as http, caller(service, ANNS_KEY) as other:
        watching = [placements(http) for _ in range(2)]
        for each in watching:
            await anext(each)
        keys.write_text(f"bob:{KEY}\nann:{ANNS_KEY}\n")

        async def is_known() -> bool:
            return (await other.get("/v1/models")).status_code == 200

        await until(is_known)
        async with http.stream("GET", PLACEMENT) as refused:
            assert refused.status_code == 429
        await anext(placements(other))
        for each in watching:
            await each.aclose()


async def test_a_service_that_stops_does_not_wait_for_who_watches(swarm: Swarm) -> None:
    service = await swarm.add_client(grace_s=60.0)
    async with caller(service) as http, http.stream("GET", PLACEMENT) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        swarm.clients.remove(service)
        async with asyncio.timeout(10):
            stopping = asyncio.create_task(service.stop())
            rest = [line async for line in lines]
            await stopping
    assert "event: error" not in rest


async def test_no_other_hosts_page_reads_the_placement_where_nobody_has_a_key(swarm: Swarm) -> None:
    service = await swarm.add_client(api_keys_file=None)
    async with caller(service, key="", host="rebound.example") as http:
        refused = await http.get(PLACEMENT)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "host")
    async with caller(service, key="") as http:
        assert (await anext(placements(http)))["model"] == "tiny"
