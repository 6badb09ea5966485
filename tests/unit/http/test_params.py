"""Errors name the caller's field: each field of each body gets wrong values, made from the schema in the document."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from corolla.chain.cache_salts import CacheSalts
from corolla.chassis.errors import InvalidRequest
from corolla.client.api import conversations
from corolla.client.api.requests import RequestParser, token_ids
from corolla.client.generation.admission import Caller
from corolla.client.output_parsing.parser_choice import OutputFormat
from corolla.client.reply_sizes import ANY_ROOM
from corolla.client.text.conversation import check_conversation
from corolla.http.body_faults import refusal
from corolla.http.errors import facts_of
from corolla.http.fields import Body
from corolla.http.foreign_fields import ignored_fields
from corolla.http.openapi import OPERATIONS, document
from corolla.http.responses import ResponseRequest
from corolla.v1 import generation_pb2 as pb
from tests.unit.client.api.test_requests import TOKENIZER

DOCUMENT = document(OPERATIONS)
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES: dict[str, Any] = {each.body.__name__: each.body for each in OPERATIONS if each.body is not None}
PARSER = RequestParser(
    pb.Model(vocab_size=300, context_length=4096, hidden_size=16),
    frozenset({"messages"}),
    OutputFormat.from_tokenizer(TOKENIZER),
    CacheSalts(""),
)
CALLER = Caller("acme")
WRONG = ({"surely": "wrong"}, 0.5, True, "surely wrong", [[[0.5]]])
KINDS = {dict: "object", float: "number", int: "integer", bool: "boolean", str: "string", list: "array"}
EXTREMES: dict[str, tuple[Any, ...]] = {
    "integer": (-(2**31), -2, 2**31 - 1),
    "number": (-1e9, 1e9),
    "string": ("", "no name: \u00e9", "x" * 70_000),
    "array": ([], ["x"] * 3000),
    "object": ({}, {"messages": 1, "type": "object"}, {"a": "x" * 70_000}),
    "boolean": (True, False),
}
SENSIBLE: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": {"messages": [{"role": "user", "content": "a"}]},
    "CompletionRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]},
    "EmbeddingRequest": {"input": "a"},
    "CountTokensRequest": {"messages": [{"role": "user", "content": "a"}]},
    "MessageRequest": {"messages": [{"role": "user", "content": "a"}]},
    "RerankRequest": {"query": "a", "documents": ["a"]},
    "ResponseRequest": {"input": "a"},
    "ScoreRequest": {"text_1": "a", "text_2": "a"},
    "SessionRequest": {},
    "TokenizeRequest": {"prompt": "a"},
}
SPOKEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
NEEDED: dict[str, dict[str, Any]] = {
    "ChatMessage": {**{name: {"role": "assistant"} for name in SPOKEN}, "tool_call_id": {"role": "tool"}},
    "JsonSchema": {name: {"schema": {"type": "object"}} for name in ("name", "strict")},
    "ChatCompletionRequest": {"tool_choice": {"tools": [{"type": "function", "function": {"name": "a"}}]}},
    "ResponseRequest": {"tool_choice": {"tools": [{"type": "function", "name": "a"}]}},
    "MessageRequest": {"tool_choice": {"tools": [{"name": "a", "input_schema": {}}]}},
    "TokenizeRequest": {"messages": {"prompt": None}},
    "CompletionRequest": {},
    "ToolCall": {name: {"function": {"name": "a"}} for name in ("id", "type", "index")},
}
"""What must stand next to a field, by its class."""
OF_ANOTHER = (
    "input: must not be empty",  # an item of an unknown type is skipped, and nothing is left here then
    "messages[0]: the last message must be the assistant's, and call no tools",  # a message of Anthropic's
)
for each in ("ChatCompletionRequest", "CompletionRequest"):
    NEEDED[each] |= {"resume_from": {"request_id": "a"}, "received": {"request_id": "a", "resume_from": 1}}


class Case(NamedTuple):
    """A body in which one field, at `path`, has the value that is tried."""

    path: str
    schema: Any
    with_value: Callable[[Any], Any]


def resolved(schema: Any) -> Any:
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def branches(schema: Any) -> list[Any]:
    """The members of a union, or the schema itself."""
    schema = resolved(schema)
    members = schema.get("anyOf") or schema.get("oneOf")
    return [each for member in members for each in branches(member)] if members else [schema]


def least(schema: Any) -> Any:
    """A small value that the schema allows."""
    schema = branches(schema)[0]
    if "const" in schema or "enum" in schema:
        return schema.get("const", next(iter(schema.get("enum", [None]))))
    match schema.get("type"):
        case "object":
            return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [least(schema["items"])]
        case kind:
            return {"string": "a", "integer": 1, "number": 1.0, "boolean": True}.get(kind)


def cases(schema: Any, path: str, with_value: Callable[[Any], Any]) -> Iterator[Case]:
    """Yields a case for each field below a value, and the value itself."""
    yield Case(path, schema, with_value)
    for each in branches(schema):
        if each.get("type") == "array":
            yield from cases(each["items"], f"{path}[0]", lambda value: with_value([value]))
        if isinstance(each.get("additionalProperties"), dict):
            inner = each["additionalProperties"]
            yield from cases(inner, f"{path}.1", lambda value: with_value({"1": value}))
        for name, field in each.get("properties", {}).items():
            base = least(each) | NEEDED.get(each["title"], {}).get(name, {})

            def with_field(value: Any, base: Any = base, name: str = name) -> Any:
                return with_value({**base, name: value})

            yield from cases(field, f"{path}.{name}" if path else name, with_field)


def allowed_kinds(schema: Any) -> set[str]:
    found = {kind for each in branches(schema) for kind in [each.get("type", "any")]}
    return found | ({"integer", "number"} if "number" in found else set())


def cases_of(name: str) -> Iterator[Case]:
    for field, schema in SCHEMAS[name]["properties"].items():
        base = {**SENSIBLE[name], **NEEDED.get(name, {}).get(field, {})}

        def with_field(value: Any, base: Any = base, field: str = field) -> Any:
            return {**base, field: value}

        yield from cases(schema, field, with_field)


def error_of(kind: type[Body], body: Any) -> dict[str, Any] | None:
    """The error of a body, as the service finds it before anything is computed; None: it is accepted."""
    try:
        read = kind.model_validate_json(json.dumps(body))
    except ValidationError as failure:
        return facts_of(refusal(body, failure))
    try:
        ignored_fields(read)
        requests = asked(read)
    except InvalidRequest as error:
        return facts_of(error)
    for number, request in enumerate(requests):
        try:
            with read.in_own_words(0 if isinstance(read, ResponseRequest) else number):
                parse(request)
        except InvalidRequest as error:
            return facts_of(error)
    return None


def asked(body: Any) -> list[Any]:
    if isinstance(body, ResponseRequest):
        return [body.as_protocol(None)]
    if not hasattr(body, "as_protocol"):
        return []
    found = body.as_protocol()
    return [*found] if isinstance(found, Iterator) else [found]


def parse(request: Any) -> None:
    match request:
        case pb.GenerateRequest():
            PARSER.text(request, CALLER, "", ANY_ROOM)
        case pb.ChatRequest():
            PARSER.chat(request, CALLER, "", ANY_ROOM)
        case pb.ScoreRequest():
            PARSER.score(request, CALLER, "", ANY_ROOM)
        case pb.EmbedRequest():
            PARSER.embedding(request, CALLER, "")
        case pb.DetokenizeRequest():
            token_ids("token_ids", request.token_ids, 300)
        case pb.TokenizeRequest() if request.WhichOneof("input") == "chat":
            messages = request.chat.messages
            conversations.check_messages(messages)
            check_conversation(messages, conversations.setting(request.chat, frozenset({"messages"})))


@pytest.mark.parametrize("name", BODIES)
def test_a_value_of_a_wrong_type_is_named_by_its_own_path(name: str) -> None:
    for case in cases_of(name):
        allowed = allowed_kinds(case.schema)
        for value in WRONG if "any" not in allowed else ():
            if KINDS[type(value)] in allowed:
                continue
            error = error_of(BODIES[name], case.with_value(value))
            # A text in place of a list's number may be another member of the list's union.
            assert error is not None or case.path.endswith("[0]"), (case.path, value)
            if error is not None:
                assert is_at(case.path, error["param"]), (case.path, value, error)
                for word in ("Input", "literal", "tagged", "union", "Request", "Fields", "Part"):
                    assert word not in error["message"], (case.path, value, error)


@pytest.mark.parametrize("name", BODIES)
def test_a_value_out_of_range_is_named_by_its_own_path(name: str) -> None:
    for case in cases_of(name):
        for value in [each for kind in allowed_kinds(case.schema) for each in EXTREMES.get(kind, ())]:
            error = error_of(BODIES[name], case.with_value(value))
            if error is not None and error["message"] not in OF_ANOTHER:
                assert is_at(case.path, error["param"]), (case.path, str(value)[:90], error)


def is_at(path: str, param: str) -> bool:
    """Whether a path is the one that was changed, or lies within it."""
    return param == path or param.startswith((f"{path}.", f"{path}["))


@pytest.mark.parametrize("query", [each.query for each in OPERATIONS if each.query is not None])
def test_a_wrong_parameter_behind_the_path_is_named(query: Any) -> None:
    for name, schema in query.model_json_schema()["properties"].items():
        if "string" in allowed_kinds(schema) and not any("enum" in each for each in branches(schema)):
            continue
        right = {"boolean": "true", "integer": "7", "string": "asc"}
        query.model_validate_strings({name: next(right[kind] for kind in allowed_kinds(schema) if kind in right)})
        with pytest.raises(ValidationError) as failure:
            query.model_validate_strings({name: "surely wrong"})
        assert [place for place, _ in refusal({name: "surely wrong"}, failure.value).violations] == [name]


@pytest.mark.parametrize("name", [name for name, each in BODIES.items() if "logit_bias" in each.model_fields])
def test_an_empty_list_is_an_empty_mapping_of_biases(name: str) -> None:
    """PHP writes both in the same way."""
    body = BODIES[name].model_validate_json(json.dumps({**SENSIBLE[name], "logit_bias": []}))
    assert body.sampling() == BODIES[name].model_validate(SENSIBLE[name]).sampling()
    with pytest.raises(ValidationError):
        BODIES[name].model_validate_json(json.dumps({**SENSIBLE[name], "logit_bias": [1]}))


def test_where_a_value_may_be_wrong_the_document_has_a_refusal() -> None:
    for operation in OPERATIONS:
        replies = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"]
        assert ("400" in replies) == bool(operation.body or operation.query), operation.path
