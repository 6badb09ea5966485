"""Prometheus: buckets, the metrics that every service has, and the port on which they are read.

Each service gets a registry of its own, handed down from its composition root, so that several can live in one process.
"""

from collections.abc import Iterator
from contextlib import suppress
from socket import create_connection
from threading import Thread
from typing import Final, Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
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


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures in it."""
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
            "RPCs by method, gRPC status code, and whose fault a failure is: none, caller (bad input, a message that "
            "is too large, more than its share of a full service) or service.",
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
        # Alerts see a series grow, not begin: the first error of its kind must not be the series' first sample.
        for reason in _reasons_of_calls(CorollaError):
            self._errors.labels(reason)

    def done(self, method: str, code: str, seconds: float, fault: Fault = "none") -> None:
        self._calls.labels(method, code, fault).inc()
        self._seconds.labels(method).observe(seconds)

    def error(self, reason: str) -> None:
        self._errors.labels(reason).inc()


class TaskMetrics:
    """Restarts of background tasks that the service does without for a while."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.restarts = Counter(
            "corolla_task_restarts",
            "Background tasks that failed and were started again, by task.",
            ["task"],
            registry=registry,
        )


class MetricsEndpoint:
    """Serves `/metrics` of one registry from a thread of its own. Port 0 takes a free one."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server: WSGIServer
        self._thread: Thread
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as failure:
            raise StartupError(
                f"cannot serve metrics on {host}:{port} ({failure.strerror}); set another COROLLA_METRICS_PORT"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Ends the thread and frees the port."""
        ending = Thread(target=self._server.shutdown)
        ending.start()
        # The server looks up from its socket twice a second, or when somebody calls: a stopping event loop waits here.
        with suppress(OSError), create_connection(self._server.socket.getsockname()[:2], timeout=1):
            pass
        ending.join()
        self._server.server_close()
        self._thread.join()


def _reasons_of_calls(root: type[CorollaError]) -> Iterator[str]:
    """The reasons that calls fail for; a StartupError ends a process instead. Some come more than once."""
    yield root.reason
    for child in root.__subclasses__():
        if child is not StartupError:
            yield from _reasons_of_calls(child)
