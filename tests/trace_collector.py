"""A collector of OpenTelemetry, as far as traces need one: OTLP over gRPC in, and the tree of each trace out."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came, with the name of its process."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)

    @property
    def is_error(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def server_id(self) -> str:
        return str(self.attributes.get("corolla.server_id", ""))

    def is_under(self, other: "CollectedSpan") -> bool:
        own, parent = self.span, other.span
        return (own.trace_id, own.parent_span_id) == (parent.trace_id, parent.span_id)


class TraceCollector:
    """Serves at `address` while it is entered. Safe to use from several threads.

    Attributes:
        metadata: what the newest call brought along.
    """

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.metadata: dict[str, str | bytes] = {}
        self._spans: list[CollectedSpan] = []
        self._changed = threading.Condition()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes spans, as the method of `TraceService`."""
        with self._changed:
            self.metadata = {str(key): value for key, value in context.invocation_metadata()}
            for of_process in request.resource_spans:
                service = str(_plain(of_process.resource.attributes)["service.name"])
                for of_scope in of_process.scope_spans:
                    self._spans += [CollectedSpan(service, span) for span in of_scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[CollectedSpan]:
        """All that have come, in the order in which they began."""
        with self._changed:
            return sorted(self._spans, key=lambda each: each.span.start_time_unix_nano)

    def named(self, name: str) -> list[CollectedSpan]:
        return [each for each in self.spans if each.name == name]

    def wait(self, holds: Callable[[], bool], timeout_s: float = 30) -> None:
        """Until it holds; spans come a moment after they have ended."""
        until_s = time.monotonic() + timeout_s
        while not holds():
            with self._changed:
                left_s = until_s - time.monotonic()
                assert left_s > 0, [each.name for each in self._spans]
                self._changed.wait(min(left_s, 0.5))


def tree(spans: Sequence[CollectedSpan], root: CollectedSpan) -> str:
    """A trace as text: name, process, when it began and how long it took, and what it says."""
    return "\n".join(_lines(spans, root, root.span.start_time_unix_nano, 0))


def _lines(spans: Sequence[CollectedSpan], span: CollectedSpan, began_ns: int, depth: int) -> Iterator[str]:
    start_ms = (span.span.start_time_unix_nano - began_ns) / 1e6
    said = {key.rpartition(".")[2]: value for key, value in span.attributes.items() if key.startswith("corolla.")}
    said = {key: value for key, value in said.items() if key not in ("server_id", "batch_rows") and value != ""}
    facts = " ".join(f"{key}={_shown(value)}" for key, value in said.items())
    head = f"{'  ' * depth}{span.name}"
    error = f" {span.attributes['error.type']}" if "error.type" in span.attributes else ""
    yield f"{head:<34} {span.service:<20} {start_ms:8.1f} {span.seconds * 1e3:8.1f} ms{error}  {facts}".rstrip()
    for each in spans:
        if each.is_under(span):
            yield from _lines(spans, each, began_ns, depth + 1)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)).replace(" ", "/")
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
