"""Calls as any gRPC client makes them, and the parts of a refusal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from corolla.chassis.errors import Unauthenticated
from corolla.chassis.status import DETAILS_KEY
from corolla.sdk.async_client import AsyncClient

SERVICE = "/corolla.v1.GenerationService/"
STREAMING = frozenset({"GenerateStream", "ChatStream"})


@dataclass(frozen=True)
class Refusal:
    """A failed call: its status, and its google.rpc details by their message names."""

    code: grpc.StatusCode
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        return str(self.details["ErrorInfo"].reason)

    @property
    def domain(self) -> str:
        return str(self.details["ErrorInfo"].domain)

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.details["ErrorInfo"].metadata)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that `BadRequest` blames."""
        violations = self.details["BadRequest"].field_violations if "BadRequest" in self.details else ()
        return tuple(violation.field for violation in violations)

    @property
    def retry_after_s(self) -> float:
        delay = self.details["RetryInfo"].retry_delay
        return float(delay.seconds + delay.nanos / 1e9)


def refusal_of(failure: grpc.aio.AioRpcError) -> Refusal:
    details: dict[str, Any] = {}
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for packed in status_pb2.Status.FromString(value).details:
                name = packed.type_url.rpartition(".")[2]
                detail = getattr(error_details_pb2, name)()
                packed.Unpack(detail)
                details[name] = detail
    return Refusal(failure.code(), failure.details() or "", details)


def key_metadata(api_key: str | None) -> Sequence[tuple[str, str]]:
    return [("authorization", f"Bearer {api_key}")] if api_key is not None else []


async def is_taken(address: str, api_key: str) -> bool:
    """Whether a client service lets the caller with this key, or token, in."""
    async with AsyncClient(address, api_key=api_key) as client:
        try:
            await client.models()
        except Unauthenticated:
            return False
    return True


async def refusal(
    channel: grpc.aio.Channel,
    method: str,
    request: Message | bytes,
    *,
    api_key: str | None = None,
    timeout_s: float | None = None,
) -> Refusal:
    """Makes a call that must fail. The request's bytes go out as they are."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    metadata = key_metadata(api_key)
    untyped: Any = channel
    try:
        if method in STREAMING:
            async for _ in untyped.unary_stream(SERVICE + method)(data, metadata=metadata, timeout=timeout_s):
                pass
        else:
            await untyped.unary_unary(SERVICE + method)(data, metadata=metadata, timeout=timeout_s)
    except grpc.aio.AioRpcError as failure:
        return refusal_of(failure)
    raise AssertionError(f"{method} was not refused")
