"""A metric's name means the same in every service: dashboards add up series of one name."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from corolla.block_server.metrics import BlockServerMetrics
from corolla.chassis.errors import StartupError
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics
from corolla.client.metrics import ClientMetrics
from corolla.router.metrics import RouterMetrics


def test_no_two_services_mean_different_things_by_one_name() -> None:
    services: list[Callable[[CollectorRegistry], object]] = [
        RpcMetrics, BlockServerMetrics, RouterMetrics, ClientMetrics,
    ]  # fmt: skip
    meanings: dict[str, set[str]] = {}
    for service in services:
        registry = CollectorRegistry()
        service(registry)
        for family in registry.collect():
            meanings.setdefault(family.name, set()).add(family.documentation)
    assert meanings
    assert {name: texts for name, texts in meanings.items() if len(texts) > 1} == {}


@pytest.fixture
def serving() -> set[str]:
    """Holds something while the service of `endpoint` serves."""
    return set()


@pytest.fixture
def endpoint(serving: set[str]) -> Iterator[MetricsEndpoint]:
    registry = CollectorRegistry()
    RpcMetrics(registry)
    endpoint = MetricsEndpoint(registry, "127.0.0.1", 0, lambda: bool(serving))
    endpoint.start()
    yield endpoint
    endpoint.close()


def read(endpoint: MetricsEndpoint) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=30) as response:
        text: bytes = response.read()
    return text.decode()


def half_a_request(endpoint: MetricsEndpoint) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", endpoint.port), timeout=30)
    connection.sendall(b"GET /metrics HT")
    return connection


def test_half_sent_requests_hold_few_threads_and_keep_nobody_from_reading(endpoint: MetricsEndpoint) -> None:
    num_threads = threading.active_count()
    with ExitStack() as opened:
        connections = [opened.enter_context(half_a_request(endpoint)) for _ in range(60)]
        assert "corolla_errors_total" in read(endpoint)
        assert threading.active_count() <= num_threads + 20
        # The oldest of them are cut off.
        assert connections[0].recv(1) == b""


def test_a_port_that_is_taken_is_named(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(StartupError, match=rf"127\.0\.0\.1:{endpoint.port} .*COROLLA_METRICS_PORT"):
        MetricsEndpoint(CollectorRegistry(), "127.0.0.1", endpoint.port, bool)


def test_a_closed_port_is_free_again_though_a_request_was_half_sent() -> None:
    endpoint = MetricsEndpoint(CollectorRegistry(), "127.0.0.1", 0, bool)
    endpoint.start()
    with half_a_request(endpoint):
        endpoint.close()
        MetricsEndpoint(CollectorRegistry(), "127.0.0.1", endpoint.port, bool).close()


def test_health_needs_no_certificate(endpoint: MetricsEndpoint, serving: set[str]) -> None:
    def asked() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/health", timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()

    assert asked() == (503, b"NOT_SERVING\n")
    serving.add("corolla")
    assert asked() == (200, b"SERVING\n")
