"""Forms of answers, as callers of the Python client may write them."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from corolla.chassis.errors import InvalidRequest
from corolla.sdk.requests import chat_request, generate_request


class Person(BaseModel):
    name: str


SCHEMA = {"type": "object", "properties": {"z": {}, "a": {}}}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": ""}),
        ({"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
        (Person, {"json_schema": json.dumps(Person.model_json_schema())}),
        ({"type": "regex", "regex": "a+"}, {"regex": "a+"}),
        ({"type": "choice", "choice": ("a", "b")}, {"choice": "ab"}),
        ({"type": "lark", "lark": "start: /a/"}, {"lark": "start: /a/"}),
    ],
)
def test_forms_become_messages(given: Any, expected: dict[str, str] | None) -> None:
    for request in (generate_request("x", {"response_format": given}), chat_request([], {"response_format": given})):
        form = request.response_format
        found = {"choice": "".join(form.choice.texts), "json_object": ""}
        kind = form.WhichOneof("format")
        assert (None if kind is None else {kind: found.get(kind, getattr(form, kind))}) == expected


@pytest.mark.parametrize(
    "given",
    [
        "json", 7, {}, {"type": "strange"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {1, 2}}}, {"type": "regex", "regex": 3},
        {"type": "choice", "choice": 3},
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate_request("x", {"response_format": given})
    assert refused.value.violations[0][0] == "response_format"


def test_biases_are_numbers_by_token_ids() -> None:
    request = generate_request("x", {"logit_bias": {3: -1.5, 4: 2}})
    assert dict(request.sampling.logit_bias) == {3: -1.5, 4: 2.0}
    wrong: list[Any] = [{"3": 1.0}, {3: "much"}, {-1: 1.0}, 7]
    for given in wrong:
        with pytest.raises(InvalidRequest) as refused:
            generate_request("x", {"logit_bias": given})
        assert refused.value.violations[0][0] == "logit_bias"
