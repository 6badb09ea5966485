import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.wire.span import Span

spans = st.builds(lambda start, length: Span(start, start + length), st.integers(0, 99), st.integers(1, 99))


@given(spans)
def test_a_span_is_read_as_it_is_written(span: Span) -> None:
    assert Span.parse(str(span)) == span
    assert len(span) == span.end - span.start > 0


@given(spans, spans)
def test_a_span_covers_spans_within_its_bounds(left: Span, right: Span) -> None:
    blocks = set(range(left.start, left.end))
    assert left.covers(right) == (set(range(right.start, right.end)) <= blocks)


@pytest.mark.parametrize("text", ["", "3", "3:3", "4:3", "-1:2", "a:b", "1:2:3", ":", "1:", ":2"])
def test_an_invalid_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Span.parse(text)
