"""Spans of requests and of their steps. A span is current in its block of code, and the parent of spans begun there.

Spans hold names and numbers only: no text, no key, no session id, and no exception's own text.
"""

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Literal, Self

from opentelemetry import context as contexts
from opentelemetry import trace

from corolla.chassis.errors import CorollaError
from corolla.chassis.tracing.carriers import TraceParent

SpanName = Literal["queue", "open", "prefill", "decode", "recovery", "replay", "handover"]

Fact = str | bool | int | float | list[str]

# Until `use` is called, this is the tracer of the program that uses the library; without one, no span is made.
_tracer: trace.Tracer = trace.get_tracer("corolla")
_is_collected = False


def use(tracer: trace.Tracer | None) -> None:
    """Collects this process' spans with `tracer` from now on; None stops the collection."""
    global _tracer, _is_collected
    _tracer, _is_collected = tracer or trace.get_tracer("corolla"), tracer is not None


def is_collected() -> bool:
    """This process' sampled spans are collected."""
    return _is_collected


class Span:
    """A span of this process; a span that is not sampled ignores everything."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def is_sampled(self) -> bool:
        return self._span.is_recording()

    def note(self, **facts: Fact) -> None:
        """Adds facts as attributes `corolla.NAME`."""
        if self._span.is_recording():
            self._span.set_attributes(_attributes(facts))

    def describe(self, attributes: Mapping[str, Fact]) -> None:
        """Adds attributes with the names of OpenTelemetry's conventions."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def end(self, failure: BaseException | None = None) -> None:
        """Ends the span, with or without a failure. A failure that the caller caused does not mark it as an error."""
        if not self._span.is_recording():
            return
        if failure is not None:
            self._span.set_attribute("error.type", error_type(failure))
            is_callers = isinstance(failure, CorollaError) and failure.is_callers_fault
            if not is_callers and not isinstance(failure, asyncio.CancelledError | GeneratorExit):
                self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()

    def __enter__(self) -> Self:
        if self._span.is_recording():
            self._token = contexts.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span.is_recording():
            contexts.detach(self._token)
            self.end(failure)


NOT_SAMPLED: Final = Span(trace.INVALID_SPAN)


class RequestSpan(Span):
    """The span of a request. It is current from its beginning to the end of the task that began it.

    A request's generators may be closed by another task than the one that ran them, and that task cannot reset the
    context variable.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        if self._span.is_recording():
            contexts.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(failure)


def request(name: str, caller: TraceParent | None, *, trusts_caller: bool) -> RequestSpan:
    """Begins the span of a caller's request.

    Args:
        caller: The caller's span, if it sent one.
        trusts_caller: True: the caller's trace continues here, and the caller decides whether it is sampled. False: a
            new trace begins, sampled at the rate of this process, with a link to the caller's. So an untrusted caller
            can neither fill the collector nor choose ids.
    """
    if not _is_collected:
        return RequestSpan(trace.INVALID_SPAN)
    if caller is not None and trusts_caller:
        parent = _under(caller)
        return RequestSpan(_tracer.start_span(name, parent, trace.SpanKind.SERVER))
    links = [trace.Link(caller.context)] if caller is not None else []
    return RequestSpan(_tracer.start_span(name, contexts.Context(), trace.SpanKind.SERVER, links=links))


def served(name: str, caller: TraceParent | None) -> Span:
    """Begins the span of another service's call, if that call is traced."""
    if caller is None or not caller.is_sampled or not _is_collected:
        return NOT_SAMPLED
    return Span(_tracer.start_span(name, _under(caller), trace.SpanKind.SERVER))


def span(name: SpanName, under: TraceParent | None = None, **facts: Fact) -> Span:
    """Begins a span below the current one, or below `under`, which belongs to another process."""
    if under is not None:
        return Span(_tracer.start_span(name, _under(under), attributes=_attributes(facts)))
    if not trace.get_current_span().is_recording():
        return NOT_SAMPLED
    return Span(_tracer.start_span(name, attributes=_attributes(facts)))


def record(
    name: SpanName,
    under: TraceParent,
    seconds: float,
    attributes: Mapping[str, Fact],
    failure: BaseException | None = None,
) -> None:
    """Records a span below `under`, a span of another process; it took `seconds` and has just ended."""
    end_ns = time.time_ns()
    done = _tracer.start_span(name, _under(under), attributes=attributes, start_time=end_ns - round(seconds * 1e9))
    if failure is not None:
        done.set_attribute("error.type", error_type(failure))
        done.set_status(trace.StatusCode.ERROR)
    done.end(end_ns)


def event(name: str) -> None:
    """Adds an event, which has no duration, to the current span."""
    trace.get_current_span().add_event(name)


def error_type(failure: BaseException) -> str:
    """Returns a failure's reason in the error tree; CANCELLED or INTERNAL for an exception that is not in it."""
    if isinstance(failure, CorollaError):
        return failure.reason
    return "CANCELLED" if isinstance(failure, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


def _under(parent: TraceParent) -> contexts.Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(parent.context), contexts.Context())


def _attributes(facts: Mapping[str, Fact]) -> Mapping[str, Fact]:
    return {f"corolla.{name}": fact for name, fact in facts.items()}
