"""Makes gRPC handlers from servicers.

This module, not gRPC, parses requests, so that undecodable bytes and over-long messages get a status of Corolla's own.
It also reads them, after it has let the caller in: gRPC would read a single request before it calls a handler, and a
refused caller's request must take no memory. And it writes single responses, since gRPC does not say whether it could
send one. Therefore all methods are registered as ones that read and write streams; they look the same on the wire.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any, Final

import grpc
from google.protobuf import descriptor, message, message_factory
from google.protobuf.message import DecodeError
from grpc import aio

from corolla.chassis import calls, errors
from corolla.chassis.calls import UNCOUNTED, Authenticate, Call, Guard, Holding, call_path
from corolla.chassis.message_fields import check_fields
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.status import trailing_metadata
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import trace_parent

__all__ = ["MAX_CONTROL_REQUEST_BYTES", "Authenticate", "Call", "UnknownServices", "call_path", "service_handler"]

MostReplyBytes = Callable[[Iterable[tuple[str, str | bytes]]], int]
Hold = Callable[[Call[Any]], AbstractContextManager[Holding]]
Parse = Callable[[bytes, Holding], message.Message]
Check = Callable[[message.Message], object]

Context = aio.ServicerContext[Any, Any]

_REFUSAL_S: Final = 0.1
MAX_CONTROL_REQUEST_BYTES: Final = 4 << 20


def service_handler(
    service: descriptor.ServiceDescriptor,
    servicer: object,
    metrics: RpcMetrics,
    *,
    max_request_bytes: int = MAX_CONTROL_REQUEST_BYTES,
    max_fields: int | None = None,
    check: Check = lambda request: None,
    most_reply_bytes: MostReplyBytes | None = None,
    hold: Hold = lambda call: nullcontext(UNCOUNTED),
    reader_timeout_s: float | None = None,
    authenticate: Authenticate | None = None,
    audited: Container[str] = (),
    traced: bool = False,
) -> grpc.GenericRpcHandler:
    """Returns handlers for every method of `service` that `servicer` has.

    Args:
        service: The service of the generated module, such as `router_pb2.DESCRIPTOR.services_by_name["RouterService"]`.
        servicer: An object whose methods take `(request, call)`. Unary methods are coroutines, streaming ones
            asynchronous generators.
        max_request_bytes: The greatest size of a request; larger ones are refused with MESSAGE_TOO_LARGE.
        most_reply_bytes: Returns, by a call's metadata, how large a reply of a unary method its caller receives; None:
            any size.
        max_fields: The most fields of a request, counted before it is parsed; None: they are not counted.
        check: Raises a CorollaError if a method must not see the request.
        hold: Returns the context in which the bytes of a call's request, and of its reply to a caller with a time-out,
            are counted: from the moment they are here until the call ends, or its caller reads nothing for too long.
        reader_timeout_s: How long a caller may read nothing of its answer before its call ends with CALLER_STALLED;
            None: for ever.
        authenticate: The function that authenticates callers; None: callers are not authenticated.
        audited: The methods (`Service/Method`) whose calls are all logged in the audit log; denied calls of every
            method are logged there.
        traced: Whether a call of a unary method belongs to the trace that its metadata names.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is None:
            continue
        name = f"{service.name}/{method.name}"
        guard = Guard(name, metrics, authenticate, is_audited=name in audited)
        parse = _parser(method.input_type, max_request_bytes, max_fields, check)
        answer = behaviour
        if not method.server_streaming:
            answer = _single(behaviour, most_reply_bytes, name if traced else None)
        handlers[method.name] = grpc.stream_stream_rpc_method_handler(
            _handler(guard, answer, parse, reader_timeout_s, hold), response_serializer=_serialise
        )
    # Strangers choose the names of methods, so all others of a service are counted as one.
    unknown = Guard(f"{service.name}/unknown", metrics, None, is_audited=False)
    refusal = _refuse(unknown, "this service does not have the method")
    return _Handlers(service.full_name, handlers, grpc.stream_stream_rpc_method_handler(refusal))


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of a service, and the one for all methods that it does not have.

    Args:
        service: The service's full name.
        handlers: The handlers by the names of their methods.
    """

    def __init__(
        self,
        service: str,
        handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]",
        unknown: "grpc.RpcMethodHandler[Any, Any]",
    ) -> None:
        self._service = service
        self._handlers = handlers
        self._unknown = unknown

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        service, _, method = handler_call_details.method.rpartition("/")
        return self._handlers.get(method, self._unknown) if service == f"/{self._service}" else None


class UnknownServices(grpc.GenericRpcHandler):
    """Refuses calls of services that a server does not have, and counts them as one method.

    Args:
        known: The full names of services whose handlers the server may get later.
    """

    def __init__(self, known: Container[str], metrics: RpcMetrics) -> None:
        self._known = known
        unknown = Guard("unknown", metrics, None, is_audited=False)
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
            _refuse(unknown, "this server does not have the service")
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        return None if service in self._known else self._refusal


def _refuse(guard: Guard, reason: str) -> Any:
    async def handle(requests: object, context: Context) -> None:
        async with _guarded(guard, context):
            raise errors.MethodNotAllowed(reason)

    return handle


def _serialise(response: message.Message) -> bytes:
    return response.SerializeToString()


def _parser(kind: descriptor.Descriptor, max_request_bytes: int, max_fields: int | None, check: Check) -> Parse:
    request_class = message_factory.GetMessageClass(kind)

    def parse(data: bytes, held: Holding) -> message.Message:
        if len(data) > max_request_bytes:
            raise errors.MessageTooLarge(
                f"the request has {len(data)} bytes; at most {max_request_bytes} are accepted",
                metadata={"max_request_bytes": str(max_request_bytes)},
            )
        held.take(len(data))
        if max_fields is not None:
            check_fields(data, kind, max_fields)
        try:
            request = request_class.FromString(data)
        except DecodeError:
            raise errors.MalformedMessage("request", f"the bytes are not a {kind.name}") from None
        check(request)
        return request

    return parse


async def _request(context: Context, call: Call[Any]) -> bytes:
    data = await context.read()
    if data is not aio.EOF:
        return bytes(data)
    # gRPC itself refuses a message far above the limit, tells its caller so in its own words, and cancels the call.
    call.failure = errors.MessageTooLarge("the request is far larger than is accepted")
    await asyncio.sleep(_REFUSAL_S)
    raise errors.MalformedMessage("request", "must be sent")


class _Responses:
    """Sends the responses of a streaming method, and closes their generator if the caller reads nothing for too long.

    A hanging write cannot be cancelled, and nothing else can be sent meanwhile. So the write goes on, and only the
    generator ends.

    Args:
        generator: The responses. Another task may close the generator, so nothing in it may depend on its task.
        timeout_s: The time for which a write may hang; None: for ever.
        on_stalled: A function that is called at the time-out; the caller gets CALLER_STALLED when it reads again.
    """

    def __init__(
        self, generator: AsyncGenerator[Any, None], timeout_s: float | None, on_stalled: Callable[[], None]
    ) -> None:
        self.generator = generator
        self._timeout_s = timeout_s
        self._on_stalled = on_stalled
        self._closing: asyncio.Task[None] | None = None

    async def send(self, response: message.Message, context: Context) -> None:
        """Sends a response. Raises CallerStalled after a time-out, and CancelledError when the caller has left."""
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
            raise errors.CallerStalled(f"the caller read nothing of the answer for {self._timeout_s:g} seconds")

    async def aclose(self) -> None:
        await (self._closing or self.generator.aclose())

    def _give_up(self) -> None:
        self._on_stalled()
        self._closing = asyncio.create_task(self.generator.aclose())


def _single(behaviour: Any, most_reply_bytes: MostReplyBytes | None, traced_as: str | None) -> Any:
    """A unary method as a generator of its only response."""

    async def answer(request: message.Message, call: Call[Any]) -> AsyncGenerator[message.Message, None]:
        with _span(traced_as, call.context):
            response = await behaviour(request, call)
        num_bytes = response.ByteSize()
        if most_reply_bytes is not None:
            most = most_reply_bytes(call.context.invocation_metadata() or ())
            if num_bytes > most:
                raise errors.ReplyTooLarge(
                    "reply", f"has {num_bytes} bytes, and its caller receives {most}; ask for less at a time"
                )
        call.held.add_reply(num_bytes)
        yield response

    return answer


def _handler(guard: Guard, answer: Any, parse: Parse, reader_timeout_s: float | None, hold: Hold) -> Any:
    async def handle(requests: object, context: Context) -> None:
        async with _guarded(guard, context) as call:
            with hold(call) as held:
                call.held = held

                def stalled() -> None:
                    guard.stalled()
                    held.let_go()  # the call itself may hang until its caller leaves

                responses = _Responses(
                    answer(parse(await _request(context, call), held), call), reader_timeout_s, stalled
                )
                # The servicer's own clean-up runs now, not at the next garbage collection.
                async with aclosing(responses):
                    async for response in responses.generator:
                        await responses.send(response, context)

    return handle


@asynccontextmanager
async def _guarded(guard: Guard, context: Context) -> AsyncIterator[Call[Any]]:
    """Yields an authenticated call, and sends the call's failure to its caller."""
    call = guard.begin(context)
    try:
        await guard.let_in(call)
        yield call
    except BaseException as failure:
        if (error := guard.failed(call, failure)) is not None:
            await context.abort(error.code, error.message, trailing_metadata=trailing_metadata(error))
        raise
    guard.done(call)


def _span(method: str | None, context: calls.Context) -> spans.Span:
    if method is None or not spans.is_collected():
        return spans.NOT_SAMPLED
    return spans.served(method, trace_parent(dict(context.invocation_metadata() or ())))
