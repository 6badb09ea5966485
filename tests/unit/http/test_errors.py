"""OpenAI's form of errors: each label of the tree has its status."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from corolla.chassis import errors
from corolla.chassis.status import from_reason
from corolla.http.chat import ChatCompletionRequest
from corolla.http.completions import CompletionRequest
from corolla.http.errors import ANTHROPIC, body_of, facts_of, headers_of, status_of
from corolla.http.field_paths import callers_path
from corolla.http.messages import MessageRequest
from corolla.http.readings import EmbeddingRequest, RerankRequest, ScoreRequest
from corolla.http.responses import ResponseRequest

LABELS = {
    400: {"INVALID_REQUEST", "MALFORMED_MESSAGE", "CONTEXT_LENGTH_EXCEEDED", "REPLY_TOO_LARGE"},
    401: {"UNAUTHENTICATED"},
    403: {"SCOPE_DENIED", "ADAPTER_DENIED", "ROLE_DENIED", "ADDRESS_NOT_YOURS", "CAPABILITY_DENIED"},
    404: {"NOT_FOUND", "MODEL_NOT_FOUND", "SESSION_NOT_FOUND", "ADAPTER_NOT_FOUND"},
    405: {"METHOD_NOT_ALLOWED"},
    408: {"CALLER_STALLED"},
    409: {"SESSION_BUSY"},
    413: {"MESSAGE_TOO_LARGE"},
    429: {"QUOTA_EXCEEDED", "QUEUE_FULL"},
    500: {
        "INTERNAL", "NON_FINITE", "STEP_FAILED", "REQUEST_KILLS_SERVERS", "CHECKSUM_MISMATCH", "STARTUP",
        "SETTINGS", "CHECKPOINT", "UNSUPPORTED_FAMILY", "ADAPTER", "HUB_UNAVAILABLE", "SPAN_REFUSED",
        "RELEASE_MISMATCH",
    },
    503: {
        "OUT_OF_MEMORY", "LEASE_LOST", "LEASE_TAKEN", "OUT_OF_PAGES", "NO_ADAPTER_ROOM", "POSITION_GAP",
        "STALE_EPOCH", "HOP_SESSION_LOST", "OUTPUTS_NOT_KEPT", "FINGERPRINT_MISMATCH", "NO_CHAIN",
        "HOP_UNAVAILABLE", "HOP_LATE", "ROUTE_UNKNOWN", "HOP_LEAVING", "ADAPTER_NOT_LOADED",
        "SERVICE_STOPPING", "ROUTER_UNAVAILABLE", "SERVICE_UNAVAILABLE", "STORE_UNAVAILABLE",
    },
    504: {"DEADLINE_EXCEEDED"},
}  # fmt: skip
"""Labels of the error tree by their HTTP status."""


def tree(root: type[errors.CorollaError]) -> Iterator[type[errors.CorollaError]]:
    """Its classes; other tests may have made some of their own."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "local_shell_call"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
    {"role": "assistant", "content": "a"},
    {"type": "function_call", "call_id": "1", "name": "a"},
    {"type": "function_call", "call_id": "2", "name": "a"},
    {"type": "function_call_output", "call_id": "2", "output": "a"},
]
PLACES_OF_ITEMS = {
    "messages": "input", "messages[2].content_parts": "input[0].content", "messages[3]": "input[2]",
    "messages[3].content": "input[3].content", "messages[3].tool_calls[1].id": "input[5].call_id",
    "messages[3].tool_calls[1].name": "input[5].name", "messages[4].tool_call_id": "input[6].call_id",
}  # fmt: skip
"""Where the parts of these items are, by their paths in the protocol, behind two earlier messages."""

USE = {"type": "tool_use", "id": "1", "name": "a", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
BLOCKS = [
    {"role": "assistant", "content": [{"type": "text", "text": "a"}, USE]},
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT, RESULT, {"type": "text", "text": "a"}]},
    {"role": "user", "content": "b"},
]
PLACES_OF_BLOCKS = {
    "messages": "messages",
    "messages[0].content": "system",
    "messages[1].tool_calls[0].id": "messages[0].content[1].id",
    "messages[1].tool_calls[1].arguments": "messages[1].content[0].input",
    "messages[3].tool_call_id": "messages[2].content[1].tool_use_id",
    "messages[4]": "messages[2]",
    "stopping.stop[1]": "stop_sequences[1]",
    "text": "messages",
}
"""Where the parts of these messages are: those of one role are joined, behind the system prompt."""

KINDS = list(dict.fromkeys(tree(errors.CorollaError)))


def made(kind: type[errors.CorollaError]) -> errors.CorollaError:
    """An error of this kind, made as from a peer's answer."""
    return from_reason(kind.reason, "it failed")


@pytest.mark.parametrize("kind", KINDS)
def test_each_label_has_its_status(kind: type[errors.CorollaError]) -> None:
    assert [status for status, labels in LABELS.items() if kind.reason in labels] == [status_of(made(kind))]


@pytest.mark.parametrize("kind", KINDS)
def test_whose_fault_it_is_shows_in_the_status(kind: type[errors.CorollaError]) -> None:
    facts = facts_of(made(kind))
    assert (facts["type"], facts["code"]) == (facts["type"].lower(), facts["code"].lower())
    anthropics = json.loads(ANTHROPIC.error_body(made(kind), "req_1"))["error"]["type"]
    assert (anthropics == "api_error") == (status_of(made(kind)) == 500)
    if kind is not errors.QueueFull:  # its status is the same where only the tenant's own share is full
        assert (status_of(made(kind)) < 500) == kind.is_callers_fault


def test_an_error_names_its_first_field() -> None:
    refusal = errors.InvalidRequest("max_tokens", "must be at least 1", ("prompt[3]", "is too much"))
    facts = json.loads(body_of(refusal))["error"]
    assert facts == {
        "message": "max_tokens: must be at least 1; prompt[3]: is too much",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "invalid_request",
    }


@pytest.mark.parametrize(
    "kind, body, number, path, expected",
    [
        (CompletionRequest, {"prompt": "a"}, 0, "text", "prompt"),
        (CompletionRequest, {"prompt": ["a", "b"]}, 1, "prompt", "prompt[1]"),
        (CompletionRequest, {"prompt": [1, 2]}, 0, "tokens.ids[1]", "prompt[1]"),
        (CompletionRequest, {"prompt": [[1], [2, 3]]}, 1, "tokens.ids[1]", "prompt[1][1]"),
        (CompletionRequest, {"prompt": "a", "n": 1}, 0, "num_completions", "n"),
        (CompletionRequest, {"prompt": "a", "best_of": 2}, 0, "num_completions", "best_of"),
        (EmbeddingRequest, {"input": ["a", ""]}, 1, "text", "input[1]"),
        (RerankRequest, {"query": "a", "documents": ["a", {"text": "b"}]}, 1, "prompt", "documents[1].text"),
        (ScoreRequest, {"text_1": ["a"], "text_2": ["b", "c"]}, 1, "continuation", "text_1[0]"),
        (ChatCompletionRequest, {"max_completion_tokens": 1}, 0, "stopping.max_tokens", "max_completion_tokens"),
        (ChatCompletionRequest, {"guided_choice": ["a"]}, 0, "response_format.choice.texts[0]", "guided_choice[0]"),
        (
            ChatCompletionRequest,
            {"tools": [{"type": "mcp"}, {"function": {"name": "a"}}]},
            0,
            "tools[0].name",
            "tools[1].function.name",
        ),
        (ResponseRequest, {"input": "a"}, 0, "messages[0].content", "input"),
        (ResponseRequest, {"text": {"format": {"type": "json_object"}}}, 0, "response_format", "text.format"),
        (ResponseRequest, {}, 0, "expected_turns", "previous_response_id"),
        *((ResponseRequest, {"input": ITEMS}, 2, *each) for each in PLACES_OF_ITEMS.items()),
        *((MessageRequest, {"system": "s", "messages": BLOCKS}, 0, *each) for each in PLACES_OF_BLOCKS.items()),
    ],
)
def test_fields_of_the_protocol_have_the_callers_paths(
    kind: Any, body: Any, number: int, path: str, expected: str
) -> None:
    needed: dict[str, Any] = {"messages": []} if kind is ChatCompletionRequest else {}
    assert callers_path(path, kind.model_validate({**needed, **body}).paths(number)) == expected


def test_who_may_try_again_learns_when() -> None:
    assert headers_of(errors.QuotaExceeded.used_up("running_requests", 2.4)) == {"retry-after": "3"}
    assert headers_of(errors.QueueFull("full", retry_after_s=0.01)) == {"retry-after": "1"}
    assert headers_of(errors.InvalidRequest("n", "is wrong")) == {}
    assert status_of(errors.QuotaExceeded("used up")) == 429
