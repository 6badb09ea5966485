"""Servicers as gRPC handlers: the one door through which requests come in and errors go out.

Requests are parsed here rather than by gRPC, so that undecodable bytes and over-long messages get a status of our own.
They are read here, too: every method is registered as one that reads a stream, which is the same on the wire, because
gRPC reads a single request before it calls a handler, and a caller who is refused shall cost no memory for its request.
Whatever a servicer raises leaves as a status of the error tree; an exception's own text never does.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping
from contextlib import aclosing
from typing import Any, Final, Generic, TypeVar

import grpc
from google.protobuf import descriptor, message, message_factory
from google.protobuf.message import DecodeError
from grpc import aio

from corolla.chassis import audit, errors
from corolla.chassis.audit import ANYBODY, Caller
from corolla.chassis.metrics import Fault, RpcMetrics
from corolla.chassis.status import trailing_metadata

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

MAX_CONTROL_REQUEST_BYTES: Final = 4 << 20

_DENIALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

Who = TypeVar("Who", bound=Caller)


class Call(Generic[Who]):
    """One call, as a servicer gets it.

    Attributes:
        method: `Service/Method`.
        caller: ANYBODY until somebody has found out who it is.
        failure: what the call ends with if its task is cancelled; None: its caller has cancelled it.
    """

    def __init__(self, method: str, context: Context, caller: Who) -> None:
        self.method = method
        self.context = context
        self.caller = caller
        self.failure: errors.CorollaError | None = None
        self._describe: Callable[[], Mapping[str, Any]] = dict

    def describe(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Adds facts to the call's audit line, asked at its end: numbers and names, nothing of what was asked."""
        self._describe = facts

    def write(self, outcome: str, seconds: float) -> None:
        """Writes the call into the audit log."""
        facts = {"method": self.method, "outcome": outcome, "seconds": round(seconds, 3), "peer": self.context.peer()}
        audit.write("call", {**facts, **self.caller.audited(), **self._describe()})


Authenticate = Callable[[Call[Any]], Awaitable[None]]
"""Called before the request is read: sets who calls. Raises an error of the tree."""


def service_handler(
    service: descriptor.ServiceDescriptor,
    servicer: object,
    metrics: RpcMetrics,
    *,
    max_request_bytes: int = MAX_CONTROL_REQUEST_BYTES,
    reader_timeout_s: float | None = None,
    authenticate: Authenticate | None = None,
    audited: Container[str] = (),
) -> grpc.GenericRpcHandler:
    """Handlers for every method of `service` that `servicer` has.

    Args:
        service: from the generated module, for example `router_pb2.DESCRIPTOR.services_by_name["RouterService"]`.
        servicer: unary methods are coroutines, streaming ones asynchronous generators; `(request, call)`.
        max_request_bytes: larger requests are refused with MESSAGE_TOO_LARGE.
        authenticate: None: nobody is asked who they are.
        audited: of which methods each call is in the audit log; who was denied a call is there in any case.
        reader_timeout_s: how long the caller of a streaming method may take nothing of what it is sent, before its call
            ends with CALLER_STALLED; None: for ever.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is None:
            continue
        name = f"{service.name}/{method.name}"
        guard = _Guard(name, metrics, authenticate, is_audited=name in audited)
        parse = _parser(message_factory.GetMessageClass(method.input_type), max_request_bytes)
        if method.server_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(
                guard.unary_stream(behaviour, parse, reader_timeout_s), response_serializer=_serialise
            )
        else:
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(
                guard.unary_unary(behaviour, parse), response_serializer=_serialise
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


async def _request(context: Context) -> bytes:
    data = await context.read()
    if data is aio.EOF:
        raise errors.MalformedMessage("request", "there is none")
    return bytes(data)


class _Responses:
    """What a streaming method gives, until its caller has taken nothing for too long: then it is closed.

    A write that hangs cannot be taken back, and nothing can be sent next to it. So it is left alone, and only what it
    keeps waiting ends.

    Args:
        generator: nothing in it may belong to the task that runs it.
        timeout_s: None waits for ever.
        on_stalled: is called at once; the caller hears of it when it reads again.
    """

    def __init__(
        self, generator: AsyncGenerator[Any, None], timeout_s: float | None, on_stalled: Callable[[], None]
    ) -> None:
        self.generator = generator
        self._timeout_s = timeout_s
        self._on_stalled = on_stalled
        self._closing: asyncio.Task[None] | None = None

    async def send(self, response: message.Message, context: Context) -> None:
        """Raises CallerStalled, and CancelledError when the caller is gone."""
        timer = None
        if self._timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)
        try:
            await context.write(response)
        except aio.BaseError:
            raise asyncio.CancelledError from None
        finally:
            if timer is not None:
                timer.cancel()
        if self._closing is not None:
            raise errors.CallerStalled(f"nothing of the answer was taken for {self._timeout_s:g} seconds")

    async def aclose(self) -> None:
        await (self._closing or self.generator.aclose())

    def _give_up(self) -> None:
        self._on_stalled()
        self._closing = asyncio.create_task(self.generator.aclose())


class _Guard:
    """Wraps one method: asks who calls, counts and times it and turns exceptions into statuses."""

    def __init__(
        self, method: str, metrics: RpcMetrics, authenticate: Authenticate | None, *, is_audited: bool
    ) -> None:
        self._authenticate = authenticate
        self._method = method
        self._metrics = metrics
        self._is_audited = is_audited

    def unary_unary(self, behaviour: Any, parse: Callable[[bytes], message.Message]) -> Any:
        async def handle(requests: object, context: Context) -> Any:
            started = time.perf_counter()
            call: Call[Caller] = Call(self._method, context, ANYBODY)
            try:
                await self._let_in(call)
                response = await behaviour(parse(await _request(context)), call)
            except BaseException as failure:
                await self._abort(failure, call, started)
                raise
            self._done(call, started)
            return response

        return handle

    def unary_stream(
        self, behaviour: Any, parse: Callable[[bytes], message.Message], reader_timeout_s: float | None
    ) -> Any:
        async def handle(requests: object, context: Context) -> None:
            started = time.perf_counter()
            call: Call[Caller] = Call(self._method, context, ANYBODY)
            try:
                await self._let_in(call)
                responses = _Responses(behaviour(parse(await _request(context)), call), reader_timeout_s, self._stalled)
                # The servicer's own clean-up runs now, not when the garbage collector comes by.
                async with aclosing(responses):
                    async for response in responses.generator:
                        await responses.send(response, context)
            except BaseException as failure:
                await self._abort(failure, call, started)
                raise
            self._done(call, started)

        return handle

    async def _let_in(self, call: Call[Caller]) -> None:
        if self._authenticate is not None:
            await self._authenticate(call)

    def _done(self, call: Call[Caller], started: float) -> None:
        seconds = time.perf_counter() - started
        self._metrics.done(self._method, "OK", seconds)
        if self._is_audited:
            call.write("OK", seconds)

    def _stalled(self) -> None:
        log.warning("a caller does not take its answer", extra={"method": self._method})
        self._metrics.error(errors.CallerStalled.reason)

    async def _abort(self, failure: BaseException, call: Call[Caller], started: float) -> None:
        seconds = time.perf_counter() - started
        if isinstance(failure, asyncio.CancelledError) and call.failure is not None:
            failure = call.failure
        if isinstance(failure, asyncio.CancelledError):
            self._metrics.done(self._method, "CANCELLED", seconds, "caller")
            if self._is_audited:
                call.write("CANCELLED", seconds)
            return
        if isinstance(failure, errors.CorollaError):
            error = failure
        elif isinstance(failure, Exception):
            log.error("unexpected failure", extra={"method": self._method, "where": where(failure)})
            error = errors.InternalError("internal error")
        else:
            return
        fault: Fault = "caller" if error.is_callers_fault else "service"
        self._metrics.done(self._method, error.code.name, seconds, fault)
        if not isinstance(error, errors.CallerStalled):  # which was counted when it came about
            self._metrics.error(error.reason)
        if self._is_audited or error.code in _DENIALS:
            call.write(error.reason, seconds)
        await call.context.abort(error.code, error.message, trailing_metadata=trailing_metadata(error))


def where(failure: BaseException) -> str:
    """Type and call path of an exception without its text, which might quote a prompt."""
    frames = traceback.extract_tb(failure.__traceback__)
    path = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(failure).__name__} at {path}"
