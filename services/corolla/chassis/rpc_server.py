"""A service's gRPC server with health and reflection."""

import grpc
from google.protobuf import descriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from corolla.chassis.channels import CallerBounds, bind, new_server
from corolla.chassis.handlers import UnknownServices
from corolla.chassis.health import HealthServicer
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.reflection import add_reflection

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RpcServer:
    """A gRPC server that starts as NOT_SERVING. `ready()` sets SERVING; `stop()` sets NOT_SERVING before it stops.

    Args:
        metrics: Where calls of unknown services are counted; None: gRPC refuses them, and nothing counts them.

    Attributes:
        is_serving: Whether the health status is SERVING.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        with_reflection: bool,
        callers: CallerBounds | None = None,
        credentials: grpc.ServerCredentials | None = None,
        metrics: RpcMetrics | None = None,
    ) -> None:
        self._server = new_server(callers)
        self._with_reflection = with_reflection
        self._metrics = metrics
        self._services = [health.SERVICE_NAME]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._is_started = False
        self.is_serving = False
        self.port = bind(self._server, host, port, credentials)

    def add(self, service: descriptor.ServiceDescriptor, handler: grpc.GenericRpcHandler) -> None:
        """Serves `service` with a handler from `corolla.chassis.handlers`."""
        self.announce(service)
        self._server.add_generic_rpc_handlers((handler,))

    def announce(self, service: descriptor.ServiceDescriptor) -> None:
        """Names a service whose handler is added after the start; health and reflection know it from the start."""
        if service.full_name not in self._services:
            self._services.append(service.full_name)

    async def start(self) -> None:
        await self._set_all(_NOT_SERVING)
        if self._with_reflection:
            add_reflection(self._services, self._server)
        if self._metrics is not None:
            # gRPC asks handlers in order. Those of announced services may come after this one.
            announced = frozenset(self._services) - {health.SERVICE_NAME}
            self._server.add_generic_rpc_handlers((UnknownServices(announced, self._metrics),))
        self._is_started = True
        await self._server.start()

    async def ready(self) -> None:
        await self._set_all(_SERVING)

    async def not_ready(self) -> None:
        await self._set_all(_NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and gives running ones `grace_s` seconds."""
        await self._set_all(_NOT_SERVING)
        if not self._is_started:
            # gRPC listens from `bind` on, but frees the port only for a server that has started.
            await self._server.start()
        await self._server.stop(grace_s)

    async def _set_all(self, status: int) -> None:
        self.is_serving = status == _SERVING
        for service in ("", *self._services):
            self._health.set(service, status)
