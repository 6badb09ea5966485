"""Bodies of HTTP on their own: what a wrong one costs, and what each is in the protocol."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, ValidationError

from corolla.chassis.errors import InvalidRequest
from corolla.http.body_faults import refusal
from corolla.http.body_values import MAX_PARTS, MAX_VALUES, check_values
from corolla.http.chat import ChatCompletionRequest
from corolla.http.completions import CompletionRequest
from corolla.http.fields import Fields
from corolla.http.foreign_fields import OF_ANSWERS, ignored_fields
from corolla.http.openapi import OPERATIONS
from corolla.http.responses import ResponseRequest
from corolla.http.routes import SessionRequest
from corolla.http.tokenization import DetokenizeRequest, TokenizeRequest
from corolla.v1 import generation_pb2 as pb

BODIES: list[Any] = [operation.body for operation in OPERATIONS if operation.body is not None]
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
def test_each_list_has_a_most_number_at_which_reading_ends(kind: type[BaseModel]) -> None:
    for each in schemas(kind.__pydantic_core_schema__):
        if each["type"] in ("list", "dict") and each.get("values_schema", {"type": "str"})["type"] != "any":
            assert each.get("max_length"), each


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


COMMAS = '", [{"'


@pytest.mark.parametrize(
    "body, problem",
    [
        ([COMMAS * MAX_PARTS], ""),
        (["\\", '"', COMMAS * MAX_PARTS, "\\"], ""),
        ([0] * MAX_VALUES, ""),
        ([0] * (MAX_VALUES + 1), f"has more than {MAX_VALUES} values"),
        ([""] * (MAX_PARTS - 1), ""),
        ([""] * (MAX_PARTS + 1), f"has more than {MAX_PARTS} texts, lists and objects"),
        ([[]] * (MAX_PARTS - 1), ""),
        ([[]] * MAX_PARTS, f"has more than {MAX_PARTS} texts, lists and objects"),
        ([{"a": 0}] * (MAX_PARTS // 2 + 1), f"has more than {MAX_PARTS} texts, lists and objects"),
        (["\\"] * (MAX_PARTS + 1), f"has more than {MAX_PARTS} texts, lists and objects"),
    ],
)
def test_values_are_counted_outside_of_texts(body: Any, problem: str) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    if not problem:
        check_values(data)
        return
    with pytest.raises(InvalidRequest) as refusal:
        check_values(data)
    assert refusal.value.violations == (("body", problem),)


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
    assert ignored_fields(body) == [
        "bad%0D%0Aname", "temprature", "messages[0].provider", "messages[1].provider", "messages[0].content[0].mood",
        "messages[1].content[0].mood",
    ]  # fmt: skip
    assert not body.model_extra
    assert ignored_fields(parse(ChatCompletionRequest, ASKED[ChatCompletionRequest])) == []
    many = {**ASKED[CompletionRequest], **{f"field_{number}": 0 for number in range(MANY)}}
    assert ignored_fields(parse(CompletionRequest, many))[15:] == ["field_111", f"({MANY - 16} more)"]


def test_tools_and_items_of_other_kinds_are_skipped_and_named() -> None:
    tools = [{"type": "web_search", "filters": {}}, {"type": "custom", "name": "apply_patch", "format": {"type": "x"}}]
    items = [{"type": "local_shell_call", "action": {}}, {"role": "user", "content": "a"}, {"type": "mcp_list_tools"}]
    body = parse(ResponseRequest, {"input": items, "tools": tools, "client_metadata": {"a": "b"}})
    assert ignored_fields(body) == [
        "client_metadata", "input[0] (local_shell_call)", "input[2] (mcp_list_tools)", "tools[0] (web_search)",
        "tools[1] (custom)",
    ]  # fmt: skip
    request = body.as_protocol(None)
    assert [each.content for each in request.messages] == ["a"]
    assert not request.tools
    chat = parse(ChatCompletionRequest, {**ASKED[ChatCompletionRequest], "tools": tools})
    assert ignored_fields(chat) == ["tools[0] (web_search)", "tools[1] (custom)"]
    assert not chat.as_protocol().tools


@pytest.mark.parametrize(
    "kind, given, named",
    [
        (ResponseRequest, {"truncation": "auto", "max_tool_calls": 1}, ["max_tool_calls", "truncation"]),
        (ResponseRequest, {"include": ["message.output_text.logprobs", "a b"]}, ["include[1] (a%20b)"]),
        (ResponseRequest, {"truncation": "disabled", "service_tier": "auto", "store": False, "user": "a"}, []),
        (ResponseRequest, {"reasoning": {"summary": "auto"}}, ["reasoning.summary"]),
        (ChatCompletionRequest, {"service_tier": "flex", "store": True}, ["service_tier", "store"]),
        (ChatCompletionRequest, {"store": False, "verbosity": "medium", "prediction": None}, []),
        (ChatCompletionRequest, {"größe": 1, "a, b": 2, "名": None}, ["a%2C%20b", "gr%C3%B6%C3%9Fe"]),
        (ChatCompletionRequest, {"min_tokens": 0, "temprature": None}, []),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "signature": "x"}]}]},
            ["messages[0].content[0] (thinking)"],
        ),
    ],
)
def test_what_is_ignored_is_named_if_it_asks_for_something(kind: Any, given: Any, named: list[str]) -> None:
    assert ignored_fields(parse(kind, {**ASKED[kind], **given})) == named


MEDIA = [
    ({"type": "image_url", "image_url": {"url": "data:,"}}, "images are"),
    ({"type": "input_image", "image_url": "data:,"}, "images are"),
    ({"type": "input_audio", "input_audio": {"data": ""}}, "audio is"),
    ({"type": "video_url", "video_url": {}}, "videos are"),
    ({"type": "file", "file": {"file_id": "a"}}, "files are"),
    ({"type": "input_file", "file_id": "a"}, "files are"),
]


@pytest.mark.parametrize("part, held", MEDIA)
def test_media_are_refused_by_their_parts(part: Any, held: str) -> None:
    text = {"type": "text", "text": "What is this?"}
    for kind, body, place in (
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [text, part]}]}, "messages[0].content[1]"),
        (TokenizeRequest, {"messages": [{"role": "tool", "content": [part]}]}, "messages[0].content[0]"),
        (ResponseRequest, {"input": [{"role": "user", "content": [text, part]}]}, "input[0].content[1]"),
        (ResponseRequest, {"input": [{"role": "user", "content": "a"}, part]}, "input[1]"),
        (
            ResponseRequest,
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [part]}]},
            "input[0].output[0]",
        ),
    ):
        with pytest.raises(ValidationError) as failure:
            parse(kind, body)
        error = refusal(body, failure.value)
        assert error.violations == ((place, f"{held} not supported by this model"),)


@pytest.mark.parametrize(
    "kind, body, expected",
    [
        (CompletionRequest, {"prompt": ["a", 5]}, ("prompt[1]", "must be a text")),
        (CompletionRequest, {"prompt": "a", "suffix": "b"}, ("suffix", "must be empty")),
        (ResponseRequest, {"input": "a", "background": True}, ("background", "must be false")),
        (ResponseRequest, {"input": [{"type": "item_reference", "id": "a"}]}, ("input[0]", "must be the item itself")),
        (
            ResponseRequest,
            {"text": {"format": {"type": "b"}}},
            ("text.format.type", "must be 'text', 'json_object' or "),
        ),
        (ChatCompletionRequest, {"messages": [], "max_tokens": 1.5}, ("max_tokens", "must be a whole number")),
    ],
)
def test_a_fault_has_one_sentence_of_the_callers_words(kind: Any, body: Any, expected: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as failure:
        parse(kind, body)
    ((place, text),) = refusal(body, failure.value).violations
    assert (place, text.startswith(expected[1])) == (expected[0], True), text


def test_whole_numbers_may_have_a_point() -> None:
    for kind, body in ASKED.items():
        for name in ("max_tokens", "top_k", "seed", "n", "top_logprobs"):
            if name in kind.model_fields:
                number = getattr(parse(kind, {**body, name: 3.0}), name)
                assert (number, type(number)) == (3, int)


def test_what_cannot_be_followed_anywhere_is_refused_everywhere() -> None:
    for kind in BODIES:
        if "model" in kind.model_fields and kind not in (DetokenizeRequest, SessionRequest):
            assert "truncate_prompt_tokens" in kind.refused_fields, kind


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest, ResponseRequest])
def test_a_foreign_field_that_would_change_the_answer_is_refused_by_name(kind: type[BaseModel]) -> None:
    for name, refused in OF_ANSWERS.items():
        body = parse(kind, {**ASKED[kind], name: {"not": "neutral"}})
        with pytest.raises(InvalidRequest) as refusal:
            ignored_fields(body)
        assert refusal.value.violations[0][0] == name
        for neutral in (None, [], "", {}, *refused.neutral):
            assert ignored_fields(parse(kind, {**ASKED[kind], name: neutral})) == []


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
