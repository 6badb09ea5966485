"""The connection to a client service: channel options, keys, and the classes of `corolla.chassis.errors`."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from corolla.chassis import errors
from corolla.chassis.channels import MAX_FRAME_BYTES, unreached
from corolla.chassis.ignored_places import ignored_places
from corolla.chassis.status import parse_status, status_of

Metadata = tuple[tuple[str, str], ...]

ApiKey = str | Callable[[], str] | None
"""A key or token, or a function that returns the current one; None sends no key."""
AsyncApiKey = str | Callable[[], str | Awaitable[str]] | None
"""Like `ApiKey`; the function may also return an awaitable."""

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # A connection to a frozen or unreachable service fails after about fifteen seconds, even within a stream.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # This is the time that connecting may take: a service may be far away, and its machine busy.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_retries", 0),
    # A proxy from the environment variables would answer in place of a service that is not running.
    ("grpc.enable_http_proxy", 0),
]

_RECEIVES: Final = ("x-corolla-max-reply-bytes", str(MAX_FRAME_BYTES))
"""How large a reply this client receives. Without a number, services keep to what most clients of gRPC receive."""

# CANCELLED is one of them, since a stopping service cancels the calls that outlast its grace period.
_UNREACHED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})


def call_metadata(api_key: ApiKey) -> Metadata:
    """Returns the metadata of a call that begins now, with the current key or token."""
    return _metadata(api_key() if callable(api_key) else api_key)


async def async_call_metadata(api_key: AsyncApiKey) -> Metadata:
    """Does the same as `call_metadata`, for asyncio."""
    given = api_key() if callable(api_key) else api_key
    return _metadata(await given if inspect.isawaitable(given) else given)


def called(method: Any, request: Any, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """Makes a unary call. Returns the answer, and the places in the request that had no effect."""
    answer, call = method.with_call(request, **options)
    return answer, ignored_places(call.trailing_metadata())


async def async_called(method: Callable[..., Any], request: Any, **options: Any) -> tuple[Any, tuple[str, ...]]:
    """Does the same as `called`, for asyncio."""
    call = method(request, **options)
    return await call, ignored_places(await call.trailing_metadata())


def read(call: Any) -> Any:
    """Returns the next message of a stream; None at its end."""
    return next(call, None)


async def async_read(call: Any) -> Any:
    """Does the same as `read`, for asyncio. Raises StopAsyncIteration if other code has closed the stream."""
    try:
        message = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # This task was not cancelled, so its iteration just ends.
        raise StopAsyncIteration from None
    return None if message is grpc.aio.EOF else message


def begun(method: Callable[..., Any], api_key: ApiKey) -> Any:
    """Starts a call with the current key or token, and returns it."""
    return method(metadata=call_metadata(api_key))


def async_begun(method: Callable[..., Any], api_key: AsyncApiKey) -> Any:
    """Starts a call and returns it; if the key must be awaited, returns a coroutine that does this."""
    given = api_key() if callable(api_key) else api_key
    if not inspect.isawaitable(given):
        return method(metadata=_metadata(given))

    async def begin() -> Any:
        return method(metadata=_metadata(await given))

    return begin()


def _metadata(api_key: str | None) -> Metadata:
    return (_RECEIVES, ("authorization", f"Bearer {api_key}")) if api_key else (_RECEIVES,)


def error_of(
    failure: grpc.RpcError,
    address: str,
    kind: type[errors.CorollaError] = errors.ServiceUnavailable,
    service: str = "client service",
) -> errors.CorollaError:
    """Returns the error of `corolla.chassis.errors` for a failed call.

    Args:
        address: where the service was called.
        kind: the class of the error if it does not answer there.
        service: what was called.
    """
    if (status := status_of(failure)) is not None:
        return parse_status(status)
    code = failure.code() if isinstance(failure, grpc.Call | grpc.aio.AioRpcError) else None
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded("the call took longer than its timeout")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.MessageTooLarge("a message is larger than the service or this connection takes")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return kind(f"{address} is not a Corolla {service} of this version")
    if code is None or code in _UNREACHED:
        details = str(failure.details()) if isinstance(failure, grpc.Call | grpc.aio.AioRpcError) else ""
        return unreached(kind, service, address, details)
    return errors.InternalError(f"the call to {address} failed with {code.name}")
