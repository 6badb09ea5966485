"""gRPC reflection, in version 1 and in v1alpha. They differ in the name of their package, and the library has one."""

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

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
