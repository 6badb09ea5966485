"""Prometheus metrics: buckets of histograms, the metrics that every service has, and the port that serves them.

Each service has a registry of its own, which its composition root creates, so that one process can hold several
services.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Final, Literal
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from corolla.chassis.errors import CorollaError, StartupError

TIME_TO_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_BUCKETS: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
RECOVERY_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 30, 60)
TOKEN_COUNT_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
BATCH_ROWS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Fault = Literal["none", "caller", "service"]

_MAX_CONNECTIONS: Final = 16
_POLL_S: Final = 0.05


def new_registry() -> CollectorRegistry:
    """Creates a registry with the metrics of the process itself."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class RpcMetrics:
    """Calls by method and gRPC code, their durations, and errors by their label in the error tree."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "corolla_rpcs",
            "RPCs by method, gRPC status code, and which side caused a failure: none, caller (bad input, a message "
            "that is too large, more than its share of a full service) or service.",
            ["method", "code", "fault"],
            registry=registry,
        )
        self._seconds = Histogram(
            "corolla_rpc_seconds",
            "Duration of RPCs in seconds.",
            ["method"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._errors = Counter(
            "corolla_errors", "Errors by their label in the error tree.", ["reason"], registry=registry
        )
        # Alerts see a series grow, not begin. So each series exists, at 0, before its first error.
        for reason in _reasons_of_calls(CorollaError):
            self._errors.labels(reason)

    def done(self, method: str, outcome: CorollaError | str, seconds: float, fault: Fault = "none") -> None:
        code = outcome.code.name if isinstance(outcome, CorollaError) else outcome
        self._calls.labels(method, code, fault).inc()
        self._seconds.labels(method).observe(seconds)

    def error(self, reason: str) -> None:
        self._errors.labels(reason).inc()


class TaskMetrics:
    """Restarts of background tasks without which the service can work for a while."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.restarts = Counter(
            "corolla_task_restarts",
            "Background tasks that failed and were started again, by task.",
            ["task"],
            registry=registry,
        )


class GrammarMetrics:
    """Grammars of answers: their outcomes, and how long they took to compile.

    Args:
        name: The prefix of the metrics' names.
    """

    def __init__(self, registry: CollectorRegistry, name: str) -> None:
        outcomes = Counter(
            f"{name}s",
            "Grammars of answers by outcome: compiled, cached (known from an earlier answer), refused (invalid, too "
            "large or too complex).",
            ["outcome"],
            registry=registry,
        )
        self.compiled, self.cached, self.refused = map(outcomes.labels, ("compiled", "cached", "refused"))
        self.seconds = Histogram(
            f"{name}_compile_seconds",
            "Time to compile a grammar, refused ones included, in seconds.",
            buckets=STEP_BUCKETS,
            registry=registry,
        )


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the library's name
        """Logs nothing: scrapes are routine."""


class _MetricsServer(ThreadingWSGIServer):
    """prometheus_client's server with few connections at a time: a further connection ends the oldest one.

    The port needs no certificate, so strangers must not be able to use up the process's threads and descriptors.
    """

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        host, port = address
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._connections: dict[socket.socket, None] = {}
        self._lock = Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            if len(self._connections) > _MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                # The thread of this connection then reads end of file, and closes the socket.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: the scraper has disconnected."""


class MetricsEndpoint:
    """Serves `/metrics` of one registry, and `/health`. It binds its port at once and serves after `start`.

    Args:
        is_serving: A function that says whether `/health` answers with status 200 or 503; the endpoint's threads call
            it. `/health` is for kubelets, which have no certificate.

    Raises:
        StartupError: The port is taken.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, is_serving: Callable[[], bool]) -> None:
        metrics = make_wsgi_app(registry)

        def answer(environ: Any, start_response: Any) -> Any:
            if environ.get("PATH_INFO") != "/health":
                return metrics(environ, start_response)
            status, said = ("200 OK", b"SERVING\n") if is_serving() else ("503 Service Unavailable", b"NOT_SERVING\n")
            start_response(status, [("Content-Type", "text/plain")])
            return [said]

        try:
            self._server = make_server(host, port, answer, _MetricsServer, _Handler)
        except OSError as failure:
            raise StartupError(
                f"cannot serve metrics on {host}:{port} ({failure.strerror}); choose another COROLLA_METRICS_PORT"
            ) from None
        # A stopping event loop waits in `close` for up to one poll interval of the server.
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, daemon=True)
        self.port: int = self._server.server_port

    def start(self) -> None:
        """Begins to serve, including clients that have connected since the port was bound."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, if it was started, and frees the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _reasons_of_calls(root: type[CorollaError]) -> Iterator[str]:
    """Yields the reasons of failed calls, some more than once. A StartupError ends a process instead of a call."""
    yield root.reason
    for child in root.__subclasses__():
        if child is not StartupError:
            yield from _reasons_of_calls(child)
