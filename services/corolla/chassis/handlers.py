"""Servicers as gRPC handlers: the one door through which requests come in and errors go out.

Requests are parsed here rather than by gRPC, so that undecodable bytes and over-long messages get a status of our own.
Whatever a servicer raises leaves as a status of the error tree; an exception's own text never does.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor, message, message_factory
from google.protobuf.message import DecodeError

from corolla.chassis import errors
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.status import trailing_metadata

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


def service_handler(
    service: descriptor.ServiceDescriptor,
    servicer: object,
    metrics: RpcMetrics,
    *,
    max_request_bytes: int = 4 << 20,
    raw_methods: Iterable[str] = (),
) -> grpc.GenericRpcHandler:
    """Handlers for every method of `service` that `servicer` has.

    Args:
        service: from the generated module, for example `router_pb2.DESCRIPTOR.services_by_name["RouterService"]`.
        servicer: unary methods are coroutines, streaming ones asynchronous generators; `(request, context)`.
        max_request_bytes: larger requests are refused with MESSAGE_TOO_LARGE.
        raw_methods: streaming methods that read and write bytes instead of messages.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is None:
            continue
        guard = _Guard(f"{service.name}/{method.name}", metrics)
        if method.name in raw_methods:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(guard.raw_stream(behaviour))
            continue
        parse = _parser(message_factory.GetMessageClass(method.input_type), max_request_bytes)
        serialise = _serialise
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                guard.unary_stream(behaviour, parse), response_serializer=serialise
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                guard.unary_unary(behaviour, parse), response_serializer=serialise
            )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _serialise(response: message.Message) -> bytes:
    return response.SerializeToString()


def _parser(request_class: type[message.Message], max_request_bytes: int) -> Callable[[bytes], message.Message]:
    def parse(data: bytes) -> message.Message:
        if len(data) > max_request_bytes:
            raise errors.MessageTooLarge(
                f"the request has {len(data)} bytes; at most {max_request_bytes} are accepted",
                metadata={"max_request_bytes": str(max_request_bytes)},
            )
        try:
            return request_class.FromString(data)
        except DecodeError:
            raise errors.MalformedMessage("request", f"the bytes are no {request_class.DESCRIPTOR.name}") from None

    return parse


class _Guard:
    """Wraps one method: counts and times it and turns exceptions into statuses."""

    def __init__(self, method: str, metrics: RpcMetrics) -> None:
        self._method = method
        self._metrics = metrics

    def unary_unary(self, behaviour: Any, parse: Callable[[bytes], message.Message]) -> Any:
        async def handle(data: bytes, context: Context) -> Any:
            started = time.perf_counter()
            try:
                response = await behaviour(parse(data), context)
            except BaseException as failure:
                await self._abort(failure, context, started)
                raise
            self._metrics.done(self._method, "OK", time.perf_counter() - started)
            return response

        return handle

    def unary_stream(self, behaviour: Any, parse: Callable[[bytes], message.Message]) -> Any:
        async def handle(data: bytes, context: Context) -> AsyncIterator[Any]:
            started = time.perf_counter()
            try:
                responses = behaviour(parse(data), context)
                try:
                    async for response in responses:
                        yield response
                finally:
                    # The servicer's own clean-up runs now, not when the garbage collector comes by.
                    await responses.aclose()
            except GeneratorExit:
                self._metrics.done(self._method, "CANCELLED", time.perf_counter() - started)
                raise
            except BaseException as failure:
                await self._abort(failure, context, started)
                raise
            self._metrics.done(self._method, "OK", time.perf_counter() - started)

        return handle

    def raw_stream(self, behaviour: Any) -> Any:
        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            started = time.perf_counter()
            try:
                await behaviour(requests, context)
            except BaseException as failure:
                await self._abort(failure, context, started)
                raise
            self._metrics.done(self._method, "OK", time.perf_counter() - started)

        return handle

    async def _abort(self, failure: BaseException, context: Context, started: float) -> None:
        if isinstance(failure, asyncio.CancelledError):
            self._metrics.done(self._method, "CANCELLED", time.perf_counter() - started)
            return
        if isinstance(failure, errors.CorollaError):
            error = failure
        elif isinstance(failure, Exception):
            log.error("unexpected failure", extra={"method": self._method, "where": where(failure)})
            error = errors.InternalError("internal error")
        else:
            return
        self._metrics.done(self._method, error.code.name, time.perf_counter() - started)
        self._metrics.error(error.reason)
        await context.abort(error.code, error.message, trailing_metadata=trailing_metadata(error))


def where(failure: BaseException) -> str:
    """Type and call path of an exception without its text, which might quote a prompt."""
    frames = traceback.extract_tb(failure.__traceback__)
    path = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(failure).__name__} at {path}"
