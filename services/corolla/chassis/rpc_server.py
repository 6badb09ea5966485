"""A service's gRPC server with health and reflection.

Reflection is served in version 1 and in v1alpha. They differ in the name of their package, and the library has one.
"""

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf import descriptor, descriptor_pb2, descriptor_pool
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from corolla.chassis.channels import CallerBounds, bind, new_server
from corolla.chassis.handlers import UnknownServices
from corolla.chassis.health import HealthServicer
from corolla.chassis.metrics import RpcMetrics

SERVICE_NAME: Final = "grpc.reflection.v1.ServerReflection"
_PACKAGE: Final = reflection_pb2.DESCRIPTOR.package
_PACKAGE_1: Final = SERVICE_NAME.rpartition(".")[0]


def add_reflection(services: Sequence[str], server: aio.Server) -> None:
    """Describes these services, and reflection itself, to callers of both versions."""
    descriptor_pool.Default().AddSerializedFile(_file_of_version_1().SerializeToString(deterministic=True))
    names = [*services, reflection.SERVICE_NAME, SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE_NAME, {"ServerReflectionInfo": handler}),)
    )


def _file_of_version_1() -> descriptor_pb2.FileDescriptorProto:
    """The file of v1alpha with the other name."""
    described = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    described.name = f"{_PACKAGE_1.replace('.', '/')}/reflection.proto"
    described.package = _PACKAGE_1
    for field in [field for message in described.message_type for field in message.field if field.type_name]:
        field.type_name = _type_of_version_1(field.type_name)
    for method in [method for service in described.service for method in service.method]:
        method.input_type = _type_of_version_1(method.input_type)
        method.output_type = _type_of_version_1(method.output_type)
    return described


def _type_of_version_1(name: str) -> str:
    return name.replace(f".{_PACKAGE}.", f".{_PACKAGE_1}.")


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
            # gRPC asks handlers in order, and the handlers of announced services may be added after this one.
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
