"""What is read of a trace context, and what is not."""

import pytest

from corolla.chassis.tracing.carriers import current_span_id, trace_headers, trace_metadata, trace_parent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_span_is_read_with_its_state() -> None:
    parent = trace_parent({"traceparent": PARENT, "tracestate": "vendor=1,other=2", "authorization": "Bearer key"})
    assert parent is not None
    assert parent.is_sampled
    assert f"{parent.context.trace_id:032x}-{parent.context.span_id:016x}" == f"{TRACE}-{SPAN}"
    assert dict(parent.context.trace_state) == {"vendor": "1", "other": "2"}


def test_another_span_of_the_trace() -> None:
    parent = trace_parent({"traceparent": PARENT})
    assert parent is not None
    other = parent.at((7).to_bytes(8))
    assert (other.context.trace_id, other.context.span_id) == (parent.context.trace_id, 7)
    assert other.is_sampled


@pytest.mark.parametrize("span_id", [b"", bytes(8), b"seven..", b"nine....."])
def test_an_id_of_no_span_leaves_the_one_that_is_known(span_id: bytes) -> None:
    parent = trace_parent({"traceparent": PARENT})
    assert parent is not None
    assert parent.at(span_id) is parent


@pytest.mark.parametrize(
    "parent",
    [
        "", PARENT.upper(), PARENT[:-1], f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-{'x' * 100}", "-".join(["00"] * 100_000),
    ],
)  # fmt: skip
def test_what_is_no_span_is_none(parent: str) -> None:
    assert trace_parent({"traceparent": parent}) is None


def test_bytes_and_nothing_are_none() -> None:
    assert trace_parent({}) is None
    assert trace_parent({"traceparent": PARENT.encode()}) is None


def test_a_state_that_is_too_long_is_left_out() -> None:
    parent = trace_parent({"traceparent": PARENT, "tracestate": "vendor=" + "1" * 506})
    assert parent is not None
    assert dict(parent.context.trace_state) == {}


def test_nothing_is_written_where_nothing_is_traced() -> None:
    assert trace_headers() == {}
    assert trace_metadata() is None
    assert current_span_id() == b""
