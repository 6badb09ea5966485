"""W3C trace contexts (https://www.w3.org/TR/trace-context), which carry a trace in headers, metadata and frames.

A context that is too long or invalid is ignored: tracing alone never makes a request fail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PARENT_HEADER: Final = "traceparent"
STATE_HEADER: Final = "tracestate"
SPAN_ID_BYTES: Final = 8

_MAX_PARENT_CHARS: Final = 128
_MAX_STATE_CHARS: Final = 512
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span of another process, under which spans of this one may begin."""

    context: trace.SpanContext

    @property
    def is_sampled(self) -> bool:
        return self.context.trace_flags.sampled

    def at(self, span_id: bytes) -> Self:
        """Returns the span with this id of the same trace; this span if the id is not valid."""
        if len(span_id) != SPAN_ID_BYTES or not any(span_id):
            return self
        own = self.context
        return type(self)(
            trace.SpanContext(own.trace_id, int.from_bytes(span_id), True, own.trace_flags, own.trace_state)
        )


def trace_parent(headers: Mapping[str, str | bytes]) -> TraceParent | None:
    """Reads the span that `traceparent` and `tracestate` name, from headers or metadata with names in lower case."""
    parent, state = headers.get(PARENT_HEADER), headers.get(STATE_HEADER)
    if not isinstance(parent, str) or len(parent) > _MAX_PARENT_CHARS:
        return None
    carrier = {PARENT_HEADER: parent}
    if isinstance(state, str) and len(state) <= _MAX_STATE_CHARS:
        carrier[STATE_HEADER] = state
    context = trace.get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return TraceParent(context) if context.is_valid else None


def trace_headers() -> Mapping[str, str]:
    """Returns the headers that name the current span; empty if it is not sampled or has ended."""
    headers: dict[str, str] = {}
    if trace.get_current_span().is_recording():
        _PROPAGATOR.inject(headers)
    return headers


def trace_metadata() -> Sequence[tuple[str, str]] | None:
    """Returns `trace_headers` in the form of gRPC's metadata."""
    return tuple(trace_headers().items()) or None


def current_span_id() -> bytes:
    """Returns the current span's id; empty if the span is not sampled or has ended. Hops that get it know the trace."""
    span = trace.get_current_span()
    return span.get_span_context().span_id.to_bytes(SPAN_ID_BYTES) if span.is_recording() else b""
