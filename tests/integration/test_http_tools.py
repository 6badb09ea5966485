"""Over HTTP: answers of a given form, tools, several answers of a chat, and roles in any order."""

import json
from typing import Any

import httpx2
import pytest

from tests.integration.swarm import tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHATS = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Where?"}], "temperature": 0, "max_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}


swarm = tiny_swarm(["0:2", "2:5"], context_length=4096, client={"http_port": 0})


async def test_tools_reach_a_model_whose_template_knows_none(http: httpx2.AsyncClient) -> None:
    plain = (await http.post("/tokenize", json={"messages": ASKED["messages"]})).json()["tokens"]
    shown = (await http.post("/tokenize", json={"messages": ASKED["messages"], "tools": [TOOL]})).json()["tokens"]
    text = (await http.post("/detokenize", json={"tokens": shown})).json()["prompt"]
    assert '"name": "weather"' in text
    assert "<tool_call>" in text
    usage = (await http.post(CHATS, json={**ASKED, "tools": [TOOL], "max_tokens": 1})).json()["usage"]
    assert usage["prompt_tokens"] == len(shown) > len(plain)


async def test_a_call_that_is_required_comes_whole_and_in_parts(http: httpx2.AsyncClient) -> None:
    body = {**ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    choice = (await http.post(CHATS, json=body)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    text = (await http.post(CHATS, json={**body, "stream": True})).text
    events = [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each.startswith("data: {")]
    parts = [part for each in events for part in each["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert parts[0]["function"]["name"] == "weather"
    conversation = [
        *ASKED["messages"],
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    assert (await http.post(CHATS, json={**ASKED, "messages": conversation, "max_tokens": 4})).status_code == 200


FREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^(?=a)"}, "uniqueItems": True},
        "city": {"enum": ["Oslo"]},
    },
    "propertyNames": {"maxLength": 9},
    "required": ["city"],
}


@pytest.mark.parametrize(
    "schema, ignored",
    [
        (FREE, ["propertyNames", "properties.tags.uniqueItems", "properties.tags.items.pattern"]),
        (
            {"type": "object", "properties": {"ö, a": {"$ref": "http://elsewhere.example/x"}}},
            ["properties.%C3%B6%2C%20a.$ref"],
        ),
        ({"type": "object", "not": {"type": "null"}}, ["not"]),
    ],
)
async def test_keywords_that_grammars_cannot_follow_are_named_by_every_door(
    http: httpx2.AsyncClient, schema: Any, ignored: list[str]
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    called = {"tools": [{"type": "web_search"}, tool], "tool_choice": "required"}
    for asked, place, others in (
        ({"response_format": form}, "response_format.json_schema.schema", []),
        ({"guided_json": schema, "stream": True}, "guided_json", []),
        (called, "tools[1].function.parameters", ["tools[0] (web_search)"]),
        ({"tools": [tool], "tool_choice": "auto"}, None, []),
    ):
        reply = await http.post(CHATS, json={**ASKED, "max_tokens": 4, **asked})
        assert reply.status_code == 200, reply.text
        expected = [] if place is None else [f"{place}.{each}" for each in ignored]
        assert reply.headers.get("x-corolla-ignored", "") == ", ".join([*others, *expected])
    unset = {"type": "function", "name": "weather", "parameters": schema}
    reply = await http.post("/v1/responses", json={"input": "a", "tools": [unset], "max_output_tokens": 4})
    assert reply.headers["x-corolla-ignored"] == ", ".join(f"tools[0].parameters.{each}" for each in ignored)


@pytest.mark.parametrize(
    "broken, named",
    [
        ({"properties": {"tags": {"type": "array", "uniqueItems": True}}}, "properties.tags.uniqueItems"),
        ({"properties": {"a": {"properties": {"b": {"pattern": "(?=x)y"}}}}}, "properties.a.properties.b.pattern"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
    ],
)
async def test_a_strict_schema_beyond_grammars_is_refused_by_its_keyword(
    http: httpx2.AsyncClient, broken: Any, named: str
) -> None:
    function = {"name": "search", "parameters": {"type": "object", **broken}, "strict": True}
    reply = await http.post(CHATS, json={**ASKED, "tools": [TOOL, {"type": "function", "function": function}]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert error["message"].endswith(f"grammars cannot follow {named}")


async def test_calls_take_precedence_over_a_form(http: httpx2.AsyncClient) -> None:
    form = {"type": "choice", "choice": ["yes", "no"]}
    body = {**ASKED, "tools": [TOOL], "response_format": form, "parallel_tool_calls": False}
    required = (await http.post(CHATS, json={**body, "tool_choice": "required"})).json()["choices"][0]["message"]
    assert required["tool_calls"][0]["function"]["name"] == "weather"
    assert required["content"] is None
    opening = (await http.post("/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False})).json()
    for bias, is_call in ((100, True), (-100, False)):
        asked = {**body, "logit_bias": {str(opening["tokens"][0]): bias}}
        message = (await http.post(CHATS, json=asked)).json()["choices"][0]["message"]
        assert (message["content"] in ("yes", "no")) is not is_call
        assert bool(message["tool_calls"]) is is_call
    unstrict = {"type": "function", "function": {"name": "now"}}
    answer = (await http.post(CHATS, json={**body, "tools": [unstrict]})).json()["choices"][0]["message"]
    assert answer["content"] in ("yes", "no") or answer["tool_calls"]


@pytest.mark.parametrize("max_tokens", [1, 3, 6, 12, 24, 200])
async def test_calls_that_are_cut_off_leave_no_markup(http: httpx2.AsyncClient, max_tokens: int) -> None:
    body = {**ASKED, "tools": [TOOL], "tool_choice": "required", "max_tokens": max_tokens}
    message = (await http.post(CHATS, json=body)).json()["choices"][0]["message"]
    assert not message["content"]
    text = (await http.post(CHATS, json={**body, "stream": True})).text
    events = [json.loads(each.removeprefix("data: ")) for each in text.split("\n\n") if each.startswith("data: {")]
    assert not any(choice["delta"].get("content") for each in events for choice in each["choices"])
    again = [*ASKED["messages"], message, {"role": "user", "content": "Go on."}]
    assert (await http.post(CHATS, json={**ASKED, "messages": again, "max_tokens": 2})).status_code == 200


async def test_a_response_calls_a_tool_and_hears_its_output(http: httpx2.AsyncClient) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    body = {"input": "Where?", "temperature": 0, "tools": [tool], "tool_choice": "required"}
    first = (await http.post("/v1/responses", json=body)).json()
    (call,) = [each for each in first["output"] if each["type"] == "function_call"][:1]
    heard = {
        "input": [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}],
        "previous_response_id": first["id"],
        "max_output_tokens": 4,
    }
    assert (await http.post("/v1/responses", json=heard)).status_code == 200
