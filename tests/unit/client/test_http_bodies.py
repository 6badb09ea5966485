"""Bodies of HTTP on their own: what a wrong one costs, and what each is in the protocol."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, ValidationError

from corolla.chassis.errors import InvalidRequest
from corolla.client.http.chat import ChatCompletionRequest
from corolla.client.http.completions import CompletionRequest
from corolla.client.http.fields import Fields
from corolla.client.http.foreign_fields import OF_ANSWERS, ignored_fields
from corolla.client.http.openapi import OPERATIONS
from corolla.client.http.responses import ResponseRequest
from corolla.client.http.tokenization import DetokenizeRequest, TokenizeRequest
from corolla.v1 import generation_pb2 as pb

BODIES = [operation.body for operation in OPERATIONS if operation.body is not None]
MANY = 1000


def schemas(part: Any) -> Iterator[dict[str, Any]]:
    """All that a schema of pydantic holds."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from schemas(each)


def may_fail(schema: Any) -> bool:
    return bool(schema) and schema["type"] != "any"


@pytest.mark.parametrize("kind", BODIES)
def test_each_list_is_refused_at_its_first_fault(kind: type[BaseModel]) -> None:
    for each in schemas(kind.__pydantic_core_schema__):
        if each["type"] == "list" and may_fail(each.get("items_schema")):
            assert each.get("fail_fast"), each
        if each["type"] == "dict" and may_fail(each.get("values_schema")):
            assert each.get("fail_fast"), each


@pytest.mark.parametrize(
    "kind, body",
    [
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": [[{}] * MANY] * 3}),
        (CompletionRequest, {"prompt": "a", "stop": [{}] * MANY, "received": [-1] * MANY}),
        (CompletionRequest, {"prompt": "a", "metadata": [{}] * MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"x{number}": 0 for number in range(MANY)}}),
        (ChatCompletionRequest, {"messages": [{}] * MANY, "tools": [{}] * MANY}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * MANY}] * MANY}),
        (ResponseRequest, {"input": [{"role": "user", "content": [{}] * MANY}] * 3, "include": [0] * MANY}),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_a_body_of_nothing_but_faults_has_few(kind: type[BaseModel], body: Any) -> None:
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate_json(json.dumps(body))
    assert refusal.value.error_count() < 10


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize("arguments", [{"a": 10**400}, nested(9), nested(150)])
def test_arguments_that_the_protocol_cannot_hold_are_refused(arguments: Any) -> None:
    body = json.dumps({"messages": [], "chat_template_kwargs": arguments})
    for kind in (ChatCompletionRequest, TokenizeRequest):
        with pytest.raises(InvalidRequest) as refusal:
            kind.model_validate_json(body).as_protocol()
        assert refusal.value.violations[0][0] == "chat_template_kwargs"


def test_arguments_may_be_eight_deep() -> None:
    body = {"messages": [], "chat_template_kwargs": nested(8)}
    assert ChatCompletionRequest.model_validate(body).as_protocol().template_arguments == nested(8)


def parse(kind: type[BaseModel], body: Any) -> Any:
    return kind.model_validate_json(json.dumps(body))


ASKED: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}]},
    ResponseRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
}


def test_unknown_fields_are_ignored_and_named_by_their_places() -> None:
    message: dict[str, Any] = {
        "role": "user",
        "content": [{"type": "text", "text": "a", "mood": 1}],
        "parsed": None,
        "provider": {},
    }
    body = parse(ChatCompletionRequest, {"messages": [message, message], "temprature": 1, "bad\r\nname": 1})
    named = ["?", "messages[].content[].mood", "messages[].parsed", "messages[].provider", "temprature"]
    assert ignored_fields(body) == named
    assert not body.model_extra
    assert ignored_fields(parse(ChatCompletionRequest, ASKED[ChatCompletionRequest])) == []
    many = {**ASKED[CompletionRequest], **{f"field_{number}": 0 for number in range(MANY)}}
    assert len(ignored_fields(parse(CompletionRequest, many))) == 16


def test_tools_and_items_of_other_kinds_are_skipped_and_named() -> None:
    tools = [{"type": "web_search", "filters": {}}, {"type": "custom", "name": "apply_patch", "format": {"type": "x"}}]
    items = [{"type": "local_shell_call", "action": {}}, {"role": "user", "content": "a"}, {"type": "item_reference"}]
    body = parse(ResponseRequest, {"input": items, "tools": tools, "client_metadata": {"a": "b"}})
    assert ignored_fields(body) == ["client_metadata", "input[]", "tools[]"]
    request = body.as_protocol(None)
    assert [each.content for each in request.messages] == ["a"]
    assert not request.tools
    chat = parse(ChatCompletionRequest, {**ASKED[ChatCompletionRequest], "tools": tools})
    assert ignored_fields(chat) == ["tools[]"]
    assert not chat.as_protocol().tools


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest, ResponseRequest])
def test_a_foreign_field_that_would_change_the_answer_is_refused_by_name(kind: type[BaseModel]) -> None:
    for name, refused in OF_ANSWERS.items():
        body = parse(kind, {**ASKED[kind], name: {"not": "neutral"}})
        with pytest.raises(InvalidRequest) as refusal:
            ignored_fields(body)
        assert refusal.value.violations[0][0] == name
        for neutral in (None, [], "", {}, *refused.neutral):
            assert ignored_fields(parse(kind, {**ASKED[kind], name: neutral})) == [name]


def test_true_is_no_neutral_one() -> None:
    with pytest.raises(InvalidRequest):
        ignored_fields(parse(CompletionRequest, {"prompt": "a", "length_penalty": True}))


def test_forms_of_answers_have_the_names_of_other_servers() -> None:
    for body, form in (
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type":"object"}'}),
        ({"guided_json": '{"type":"object"}'}, {"json_schema": '{"type":"object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": {"texts": ["a", "b"]}}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": '{"type":"object"}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            {"json_schema": '{"type":"object"}'},
        ),
    ):
        (request,) = parse(CompletionRequest, {"prompt": "a", **body}).as_protocol()
        assert MessageToDict(request.response_format, preserving_proto_field_name=True) == form
    both = {"prompt": "a", "guided_regex": "a", "response_format": {"type": "regex", "regex": "a"}}
    with pytest.raises(InvalidRequest):
        parse(CompletionRequest, both).as_protocol()


def fields_of(kind: type[BaseModel], found: dict[type[BaseModel], None] | None = None) -> dict[type[BaseModel], None]:
    """A body's class, and the classes of its parts."""
    found = {} if found is None else found
    if kind not in found:
        found[kind] = None
        for field in kind.model_fields.values():
            for each in _classes(field.annotation):
                fields_of(each, found)
    return found


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        yield annotation
    for each in get_args(annotation):
        yield from _classes(each)


PARTS = {part for kind in BODIES for part in fields_of(kind)}


@pytest.mark.parametrize("part", sorted(PARTS, key=str))
def test_any_optional_field_may_be_null(part: type[BaseModel]) -> None:
    names = {field.alias or name for name, field in part.model_fields.items() if not field.is_required()}
    wrong: set[Any] = set()
    try:
        part.model_validate_json(json.dumps(dict.fromkeys(names)))
    except ValidationError as failure:  # only for the fields that must be set
        wrong = {each["loc"][0] for each in failure.errors()}
    assert not names & wrong


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"top_p": 0, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_k": -1}, {"temperature": 1.0}),
        ({"top_k": 3}, {"temperature": 1.0, "top_k": 3}),
    ],
)
def test_values_that_switch_sampling_off(body: Any, expected: Any) -> None:
    for kind in (CompletionRequest, ChatCompletionRequest, ResponseRequest):
        sampling = parse(kind, {**ASKED[kind], **body}).sampling()
        assert {field.name: value for field, value in sampling.ListFields()} | {
            "temperature": sampling.temperature
        } == expected


def test_values_that_mean_nothing_are_taken_as_nothing() -> None:
    (request,) = parse(CompletionRequest, {"prompt": None, "stop": "", "max_tokens": -1}).as_protocol()
    assert (request.text, list(request.stopping.stop), request.stopping.HasField("max_tokens")) == ("", [], False)
    (request,) = parse(CompletionRequest, {"prompt": "a", "stop": ["", "b"]}).as_protocol()
    assert list(request.stopping.stop) == ["b"]
    asked = {**ASKED[ChatCompletionRequest], "top_logprobs": 0, "stream_options": {"include_usage": None}}
    assert not parse(ChatCompletionRequest, asked).as_protocol().HasField("logprobs")


def test_calls_come_back_in_each_form_that_clients_write() -> None:
    function = {"name": "weather", "arguments": "{}"}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "index": 0, "function": function}]},
        {"role": "assistant", "tool_calls": [{"id": "2", "type": "custom", "custom": {"name": "patch", "input": "x"}}]},
        {"role": "assistant", "content": "", "function_call": {**function, "arguments": None}},
        {"role": "function", "name": "weather", "content": "sunny"},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "No."}, {"type": "thinking", "thinking": "a"}],
        },
    ]
    request = parse(ChatCompletionRequest, {"messages": messages}).as_protocol()
    calls = [(call.name, call.arguments) for each in request.messages for call in each.tool_calls]
    assert calls == [("weather", "{}"), ("patch", '{"input":"x"}'), ("weather", "")]
    assert request.messages[3].role == "tool"
    assert list(request.messages[4].content_parts) == ["No.", ""]


def test_only_allowed_tools_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {**ASKED[ChatCompletionRequest], "tools": tools, "tool_choice": choice}
    request = parse(ChatCompletionRequest, body).as_protocol()
    assert [each.name for each in request.tools] == ["b"]
    assert request.tool_choice.mode == pb.ToolChoice.MODE_REQUIRED
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}
    named = [{"type": "function", "name": name} for name in ("a", "b")]
    response = parse(ResponseRequest, {"input": "a", "tools": named, "tool_choice": flat}).as_protocol(None)
    assert [each.name for each in response.tools] == ["a"]
