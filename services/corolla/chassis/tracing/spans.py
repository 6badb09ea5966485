"""Spans of a request and of what is done for it: each is current in its block of code, above all that begin there.

Names and numbers only: no span has a text, a key, or the id of a session. An exception's own text never comes in.
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

# Until a process says otherwise, that of whoever uses the library and traces; without one, none of these spans is made.
_tracer: trace.Tracer = trace.get_tracer("corolla")
_is_collected = False


def use(tracer: trace.Tracer | None) -> None:
    """This process' spans are collected from now on; None: no longer."""
    global _tracer, _is_collected
    _tracer, _is_collected = tracer or trace.get_tracer("corolla"), tracer is not None


def is_collected() -> bool:
    """Whether this process' spans are collected, as far as they are sampled."""
    return _is_collected


class Span:
    """A span of this process; one that is not sampled takes everything and keeps nothing."""

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
        """Adds attributes by the names of OpenTelemetry's conventions."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def end(self, failure: BaseException | None = None) -> None:
        """Ends it; without a failure it went well. A failure of the caller's own is none of the service."""
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
    """A request's. It is current from its beginning to the end of the task that it begins in.

    A request's generators may be closed by another task than the one that ran them, which could not take it back.
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
    """A request of a caller.

    Args:
        caller: what it says of its own trace.
        trusts_caller: its trace goes on here, and is sampled where it says so. Otherwise a trace begins, sampled at the
            rate of this process, and names the caller's: who calls can neither fill the collector nor choose ids.
    """
    if not _is_collected:
        return RequestSpan(trace.INVALID_SPAN)
    if caller is not None and trusts_caller:
        parent = _under(caller)
        return RequestSpan(_tracer.start_span(name, parent, trace.SpanKind.SERVER))
    links = [trace.Link(caller.context)] if caller is not None else []
    return RequestSpan(_tracer.start_span(name, contexts.Context(), trace.SpanKind.SERVER, links=links))


def served(name: str, caller: TraceParent | None) -> Span:
    """A call of another service, where that is traced."""
    if caller is None or not caller.is_sampled or not _is_collected:
        return NOT_SAMPLED
    return Span(_tracer.start_span(name, _under(caller), trace.SpanKind.SERVER))


def span(name: SpanName, under: TraceParent | None = None, **facts: Fact) -> Span:
    """What is done for the request of the current span, or for that of `under`, which another process began."""
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
    """A span that has just ended, and took so long."""
    end_ns = time.time_ns()
    done = _tracer.start_span(name, _under(under), attributes=attributes, start_time=end_ns - round(seconds * 1e9))
    if failure is not None:
        done.set_attribute("error.type", error_type(failure))
        done.set_status(trace.StatusCode.ERROR)
    done.end(end_ns)


def event(name: str) -> None:
    """Something that took no time, in the current span."""
    trace.get_current_span().add_event(name)


def error_type(failure: BaseException) -> str:
    """A failure's label in the error tree."""
    if isinstance(failure, CorollaError):
        return failure.reason
    return "CANCELLED" if isinstance(failure, asyncio.CancelledError | GeneratorExit) else "INTERNAL"


def _under(parent: TraceParent) -> contexts.Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(parent.context), contexts.Context())


def _attributes(facts: Mapping[str, Fact]) -> Mapping[str, Fact]:
    return {f"corolla.{name}": fact for name, fact in facts.items()}
