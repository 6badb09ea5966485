"""Health of a service by gRPC's protocol, and a bound for the streams that ask callers for no key."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MOST_OPEN_STREAMS: Final = 1024
"""The most streams of health and reflection at a time. Each costs the service some 15 KB."""
_OPEN: Final = "/grpc."


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Says which services serve.

    grpcio's own servicer holds a lock while it writes to a watcher. So a watcher that reads nothing would hold up all
    changes, and with them the end of the service.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        last: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status == last:
                await changed.wait()
                continue
            last = status
            yield health_pb2.HealthCheckResponse(status=status)


class OpenStreams(grpc.aio.ServerInterceptor):
    """Bounds the streams of methods that need no key, which strangers could otherwise open in any number."""

    def __init__(self) -> None:
        self._num_streams = 0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming or not handler_call_details.method.startswith(_OPEN):
            return handler
        kind = "stream_stream" if handler.request_streaming else "unary_stream"
        return handler._replace(**{kind: self._bounded(getattr(handler, kind))})

    def _bounded(self, behaviour: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            if self._num_streams >= MOST_OPEN_STREAMS:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many such streams are open")
            self._num_streams += 1
            try:
                async for each in behaviour(request, context):
                    yield each
            finally:
                self._num_streams -= 1

        return stream
