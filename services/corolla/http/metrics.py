"""The metrics of HTTP requests and connections."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from corolla.chassis.calls import Outcome
from corolla.chassis.errors import CorollaError
from corolla.chassis.metrics import REQUEST_BUCKETS, Fault, RpcMetrics
from corolla.http.errors import CLIENT_CLOSED, status_of


class HttpMetrics:
    """Metrics of HTTP requests by route and status. Errors count in gRPC's metrics.

    Args:
        rpc: The RPC metrics, which count errors by their label.
    """

    def __init__(self, registry: CollectorRegistry, rpc: RpcMetrics) -> None:
        self._rpc = rpc
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter(
            "corolla_http_requests",
            "HTTP requests by route, status, and which side caused a failure: none, caller or service. 499: the caller "
            "left. A stream that fails after its beginning counts with the status that its error would have had. Other "
            "methods of a route are its `other`, all that has no route is the `unknown path`.",
            ["route", "status", "fault"],
        )
        self._seconds = Histogram(
            "corolla_http_request_seconds",
            "Duration of HTTP requests in seconds, streams included.",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.ignored_fields = counter(
            "corolla_http_ignored_fields",
            "HTTP requests with fields that the service does not know and ignores; X-Corolla-Ignored names them.",
        )
        self.open_streams = gauge("corolla_http_open_streams", "Answers that are being streamed over HTTP.")
        self.watchers = gauge("corolla_http_watchers", "Callers that watch the placement, such as open pages.")
        self.connections = gauge("corolla_http_connections", "Open HTTP connections.")
        self.refused_connections = counter(
            "corolla_http_refused_connections", "HTTP connections refused because COROLLA_MAX_CONNECTIONS were open."
        )

    def done(self, method: str, outcome: Outcome, seconds: float, fault: Fault = "none") -> None:
        self._requests.labels(method, str(_status(outcome)), fault).inc()
        self._seconds.labels(method).observe(seconds)

    def error(self, reason: str) -> None:
        self._rpc.error(reason)


def _status(outcome: Outcome) -> int:
    if isinstance(outcome, CorollaError):
        return status_of(outcome)
    return 200 if outcome == "OK" else CLIENT_CLOSED
