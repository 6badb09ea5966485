"""OpenAI's form of errors: each label of the tree has its row."""

import json
from collections.abc import Iterator

import pytest

from corolla.chassis import errors
from corolla.client.http.errors import ROWS, body_of, headers_of, row_of


def tree(root: type[errors.CorollaError]) -> Iterator[type[errors.CorollaError]]:
    """Its classes; other tests may have made some of their own."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def test_the_table_has_the_labels_of_the_tree_and_no_others() -> None:
    assert set(ROWS) == {each.reason for each in tree(errors.CorollaError)}


@pytest.mark.parametrize("kind", dict.fromkeys(tree(errors.CorollaError)))
def test_whose_fault_it_is_shows_in_the_status(kind: type[errors.CorollaError]) -> None:
    row = ROWS[kind.reason]
    assert row.type == row.type.lower()
    if kind is not errors.QueueFull:  # to whom a full queue is, their own share is no other
        assert (row.status < 500) == kind.is_callers_fault


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
    assert row_of(errors.QuotaExceeded("used up")).status == 429
