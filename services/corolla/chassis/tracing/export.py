"""Sends a process' spans to a collector, as OpenTelemetry's own variables say.

The SDK is an extra, and is imported only where a collector is named. It sends from a thread of its own, out of a queue
that drops what is too much, so no event loop waits for a collector, and no process for its end.
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
"""What the last spans of a process may take to leave it."""

# They quote what callers sent, and headers for the collector, which may be keys.
_QUIET: Final = ("opentelemetry.trace", "opentelemetry.attributes", "opentelemetry.util")


def obstacle(environment: Mapping[str, str]) -> str | None:
    """Why no span is sent: a sentence; empty where nobody asks for it. None: nothing is in the way."""
    named = next((name for name in ENDPOINTS if environment.get(name)), None)
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if named is None or is_disabled or exporter == "none":
        return ""
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "grpc")
    if exporter != "otlp" or protocol != "grpc":
        return f"{named} is set, but no trace is sent: traces are sent by OTLP over gRPC only"
    if not _is_installed("opentelemetry.sdk") or not _is_installed("opentelemetry.exporter.otlp.proto.grpc"):
        return f"{named} is set, but no trace is sent: install corolla[tracing]"
    return None


def start(service: str) -> Callable[[], None]:
    """Begins to send this process' spans, where a collector is named and the extra is there; else logs why not.

    Args:
        service: what the process is called, where OTEL_SERVICE_NAME does not say.

    Returns:
        What ends that, and waits for the last spans for LAST_SPANS_S at most.

    Raises:
        StartupError: a variable has a value that the SDK does not take.
    """
    sentence = obstacle(os.environ)
    if sentence is not None:
        if sentence:
            log.warning(sentence)
        return lambda: None
    try:
        return _start(service)
    except Exception:
        # Their texts may quote a key.
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
        # The SDK would wait for half a minute, and has no shorter way.
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
