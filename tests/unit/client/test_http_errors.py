"""OpenAI's form of errors: each label of the tree has its status."""

import json
from collections.abc import Iterator

import pytest

from corolla.chassis import errors
from corolla.chassis.status import from_reason
from corolla.client.http.errors import body_of, facts_of, headers_of, status_of

LABELS = {
    400: {"INVALID_REQUEST", "MALFORMED_MESSAGE", "CONTEXT_LENGTH_EXCEEDED"},
    401: {"UNAUTHENTICATED"},
    403: {"SCOPE_DENIED", "ADAPTER_DENIED", "ROLE_DENIED", "ADDRESS_NOT_YOURS", "CAPABILITY_DENIED"},
    404: {"NOT_FOUND", "MODEL_NOT_FOUND", "SESSION_NOT_FOUND", "ADAPTER_NOT_FOUND"},
    408: {"CALLER_STALLED"},
    409: {"SESSION_BUSY"},
    413: {"MESSAGE_TOO_LARGE"},
    429: {"QUOTA_EXCEEDED", "QUEUE_FULL"},
    500: {
        "INTERNAL", "NON_FINITE", "STEP_FAILED", "REQUEST_KILLS_SERVERS", "CHECKSUM_MISMATCH", "STARTUP",
        "SETTINGS", "CHECKPOINT", "UNSUPPORTED_FAMILY", "ADAPTER", "HUB_UNAVAILABLE", "SPAN_REFUSED",
    },
    503: {
        "OUT_OF_MEMORY", "LEASE_LOST", "LEASE_TAKEN", "OUT_OF_PAGES", "NO_ADAPTER_ROOM", "POSITION_GAP",
        "STALE_EPOCH", "HOP_SESSION_LOST", "OUTPUTS_NOT_KEPT", "FINGERPRINT_MISMATCH", "NO_CHAIN",
        "HOP_UNAVAILABLE", "ROUTE_UNKNOWN", "HOP_LEAVING", "ADAPTER_NOT_LOADED", "SERVICE_STOPPING",
        "ROUTER_UNAVAILABLE", "SERVICE_UNAVAILABLE", "STORE_UNAVAILABLE",
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
    if kind is not errors.QueueFull:  # its status is the same where only the tenant's own share is full
        assert (status_of(made(kind)) < 500) == kind.is_callers_fault


def test_an_error_names_its_field_as_http_does() -> None:
    refusal = errors.InvalidRequest("stopping.max_tokens", "must be at least 1", ("tokens.ids[3]", "is too much"))
    facts = json.loads(body_of(refusal))["error"]
    assert facts == {
        "message": "max_tokens: must be at least 1; prompt[3]: is too much",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "invalid_request",
    }


def test_who_may_try_again_learns_when() -> None:
    assert headers_of(errors.QuotaExceeded.of("running_requests", 2.4)) == {"retry-after": "3"}
    assert headers_of(errors.QueueFull("full", retry_after_s=0.01)) == {"retry-after": "1"}
    assert headers_of(errors.InvalidRequest("n", "is wrong")) == {}
    assert status_of(errors.QuotaExceeded("used up")) == 429
