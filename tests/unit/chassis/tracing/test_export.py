"""When spans are sent, and that a collector holds up neither the start nor the end of a process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

from corolla.chassis.errors import StartupError
from corolla.chassis.tracing import export
from tests.trace_collector import TraceCollector

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ONE_SPAN = """
import logging, sys
logging.basicConfig()
from corolla.chassis.tracing import export, spans
stop = export.start("corolla-test")
with spans.request("request", None, trusts_caller=False):
    pass
{extra}
stop()
"""


def run(program: str, environment: Mapping[str, str]) -> tuple[str, str, float]:
    """What it writes, logs, and how long it takes, imports included."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, time.monotonic() - began_s


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {ENDPOINT: ""},
        {ENDPOINT: "http://a:4317", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "http://a:4317", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_asks_for_traces(environment: Mapping[str, str]) -> None:
    assert export.obstacle(environment) == ""


@pytest.mark.parametrize("name", export.ENDPOINTS)
def test_a_collector_is_named(name: str) -> None:
    assert export.obstacle({name: "http://a:4317"}) is None


@pytest.mark.parametrize("more", [{"OTEL_TRACES_EXPORTER": "console"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}])
def test_other_ways_are_refused_in_a_sentence(more: Mapping[str, str]) -> None:
    assert "OTLP over gRPC only" in (export.obstacle({ENDPOINT: "http://a:4317", **more}) or "")


@pytest.mark.parametrize(
    "service, absent",
    [
        pytest.param("block_server", ("opentelemetry.sdk", "opentelemetry.exporter"), marks=pytest.mark.full),
        ("client", ("opentelemetry.sdk", "opentelemetry.exporter")),
        # The Redis client imports the SDK's metrics by itself, where it is installed.
        pytest.param("router", ("opentelemetry.sdk.trace", "opentelemetry.exporter"), marks=pytest.mark.full),
    ],
)
def test_without_a_collector_no_service_imports_the_sdk(service: str, absent: tuple[str, ...]) -> None:
    program = f"""
import sys
import corolla.{service}.service
from corolla.chassis.tracing import export
export.start("corolla-test")()
print(*(name for name in sys.modules if name.startswith({absent})))
"""
    assert run(program, {ENDPOINT: ""})[0].strip() == ""


def test_a_missing_extra_is_a_sentence_at_the_start() -> None:
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
""" + ONE_SPAN.format(extra="")
    _, log, _ = run(program, {ENDPOINT: "http://127.0.0.1:1"})
    assert log.count(f"{ENDPOINT} is set, but no trace is sent: install the packages of the extra tracing") == 1


def test_the_last_spans_of_a_process_are_sent() -> None:
    with TraceCollector() as collector:
        run(ONE_SPAN.format(extra=""), {ENDPOINT: f"http://{collector.address}", "OTEL_RESOURCE_ATTRIBUTES": "zone=a"})
        (span,) = collector.spans
    assert (span.service, span.name) == ("corolla-test", "request")


def test_headers_for_the_collector_are_sent_and_those_that_are_none_not_logged() -> None:
    with TraceCollector() as collector:
        endpoint = {ENDPOINT: f"http://{collector.address}"}
        for headers in ("x-key=secret%20word", "a secret word"):
            _, log, _ = run(ONE_SPAN.format(extra=""), {**endpoint, "OTEL_EXPORTER_OTLP_HEADERS": headers})
            assert "secret" not in log
            assert collector.metadata.get("x-key") == ("secret word" if "=" in headers else None)


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_COMPRESSION"])
def test_a_value_that_makes_no_sense_is_a_sentence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv(name, "soon")
    with pytest.raises(StartupError, match=r"variables OTEL_\.\.\."):
        export.start("corolla-test")


def test_a_collector_that_says_nothing_holds_nothing_up() -> None:
    """It takes connections, and never answers: the event loop's thread waits for it nowhere, the end two seconds."""
    extra = """
import time
began_s = time.monotonic()
for _ in range(5000):
    with spans.request("request", None, trusts_caller=False):
        pass
print(time.monotonic() - began_s)
began_s = time.monotonic()
stop()
print(time.monotonic() - began_s)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {ENDPOINT: endpoint, "OTEL_BSP_SCHEDULE_DELAY": "10"}
        for _ in range(3):  # a machine may pause once, and not each time
            output, _, seconds = run(ONE_SPAN.format(extra=extra), environment)
            took_s, ended_s = map(float, output.split())
            if is_soon := took_s < 5 and ended_s < export.LAST_SPANS_S + 2 and seconds < 30:
                break
    assert is_soon, (took_s, ended_s, seconds)
