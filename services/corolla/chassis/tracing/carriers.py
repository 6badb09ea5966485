"""W3C trace contexts: what a caller, a router and a hop learn of a trace, in headers, metadata and frames.

A context that is too long, or none, is ignored: nobody is refused for what only a trace would have shown.
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
        """Another span of the same trace; this one where the id is none."""
        if len(span_id) != SPAN_ID_BYTES or not any(span_id):
            return self
        own = self.context
        return type(self)(
            trace.SpanContext(own.trace_id, int.from_bytes(span_id), True, own.trace_flags, own.trace_state)
        )


def trace_parent(headers: Mapping[str, str | bytes]) -> TraceParent | None:
    """What `traceparent` and `tracestate` among headers, or gRPC metadata, name; their names are in lower case."""
    parent, state = headers.get(PARENT_HEADER), headers.get(STATE_HEADER)
    if not isinstance(parent, str) or len(parent) > _MAX_PARENT_CHARS:
        return None
    carrier = {PARENT_HEADER: parent}
    if isinstance(state, str) and len(state) <= _MAX_STATE_CHARS:
        carrier[STATE_HEADER] = state
    context = trace.get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return TraceParent(context) if context.is_valid else None


def trace_headers() -> Mapping[str, str]:
    """The headers that name the current span; none where it is not sampled, or has ended."""
    headers: dict[str, str] = {}
    if trace.get_current_span().is_recording():
        _PROPAGATOR.inject(headers)
    return headers


def trace_metadata() -> Sequence[tuple[str, str]] | None:
    """`trace_headers` as gRPC takes them."""
    return tuple(trace_headers().items()) or None


def current_span_id() -> bytes:
    """Of the current span, for hops that know the trace; empty where it is not sampled, or has ended."""
    span = trace.get_current_span()
    return span.get_span_context().span_id.to_bytes(SPAN_ID_BYTES) if span.is_recording() else b""
