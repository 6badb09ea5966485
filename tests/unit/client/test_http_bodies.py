"""Bodies of HTTP on their own: what a wrong one costs, and what each is in the protocol."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from corolla.chassis.errors import InvalidRequest
from corolla.client.http.chat import ChatCompletionRequest
from corolla.client.http.completions import CompletionRequest
from corolla.client.http.openapi import OPERATIONS
from corolla.client.http.responses import ResponseRequest
from corolla.client.http.tokenization import DetokenizeRequest, TokenizeRequest

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
        (CompletionRequest, {"prompt": "a", "metadata": {str(number): 0 for number in range(MANY)}}),
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
