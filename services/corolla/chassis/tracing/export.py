"""Sends a process' spans to a collector, as OpenTelemetry's own variables configure it.

OpenTelemetry's SDK is an optional dependency, and is imported only if a variable names a collector. The SDK's own
thread sends spans from a bounded queue, which drops spans when it is full. So no event loop waits for a collector, and
a stopping process waits for at most `LAST_SPANS_S`.
"""

import importlib.util
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Final

from corolla.chassis.errors import StartupError
from corolla.chassis.tracing import spans

log = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
LAST_SPANS_S: Final = 2.0
"""The time in which a stopping process sends its last spans."""

# These loggers quote data of callers, and headers for the collector, which may be keys.
_QUIET: Final = ("opentelemetry.trace", "opentelemetry.attributes", "opentelemetry.util")


def obstacle(environment: Mapping[str, str]) -> str | None:
    """Returns a sentence that says why no span is sent; empty if no collector is configured; None if spans are sent."""
    named = next((name for name in ENDPOINTS if environment.get(name)), None)
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if named is None or is_disabled or exporter == "none":
        return ""
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "grpc")
    if exporter != "otlp" or protocol != "grpc":
        return f"{named} is set, but no trace is sent: traces are sent by OTLP over gRPC only"
    if not _is_installed("opentelemetry.sdk") or not _is_installed("opentelemetry.exporter.otlp.proto.grpc"):
        return f"{named} is set, but no trace is sent: install the packages of the extra tracing"
    return None


def start(service: str) -> Callable[[], None]:
    """Begins to send this process' spans if `obstacle` returns None; else logs its sentence, if any.

    Args:
        service: The name of the process, unless OTEL_SERVICE_NAME gives another.

    Returns:
        A function that stops the export, and waits for the last spans for at most LAST_SPANS_S.

    Raises:
        StartupError: The SDK does not accept the value of a variable.
    """
    sentence = obstacle(os.environ)
    if sentence is not None:
        if sentence:
            log.warning(sentence)
        return lambda: None
    try:
        return _start(service)
    except Exception:
        # The exception's text may quote a key.
        raise StartupError("one of the variables OTEL_... has a value that OpenTelemetry does not take") from None


def _start(service: str) -> Callable[[], None]:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    version = metadata.version("corolla")
    usual = {"service.name": service, "service.version": version, "service.instance.id": secrets.token_hex(8)}
    resource = Resource.create({**usual, **OTELResourceDetector().detect().attributes})
    exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    spans.use(provider.get_tracer("corolla", version))
    log.info("traces are sent to a collector")

    def stop() -> None:
        spans.use(None)
        # The SDK's shutdown may wait for half a minute, and has no option for less.
        sending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)
        if sending.is_alive():
            exporter.shutdown()

    return stop


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
