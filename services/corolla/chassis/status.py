"""Converts errors to gRPC statuses with google.rpc details, and back.

Only this module knows how an error of the tree looks on the wire.
"""

import math
from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from corolla.chassis import errors

DETAILS_KEY = "grpc-status-details-bin"


def to_status(error: errors.CorollaError) -> status_pb2.Status:
    """Returns the status of `error`, with an ErrorInfo and the other details of its class."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in _details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def trailing_metadata(error: errors.CorollaError) -> tuple[tuple[str, bytes], ...]:
    """Returns the metadata that a handler passes to `context.abort` with code and message."""
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


def _details(error: errors.CorollaError) -> Iterator[message.Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=errors.DOMAIN, metadata=error.metadata)
    if error.retry_after_s is not None:
        seconds = math.floor(error.retry_after_s)
        nanos = round((error.retry_after_s - seconds) * 1e9)
        yield error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))
    if isinstance(error, errors.InvalidRequest):
        violations = error_details_pb2.BadRequest()
        for field, description in error.violations:
            violations.field_violations.add(field=field, description=description)
        yield violations
    if isinstance(error, errors.ResourceNotFound):
        yield error_details_pb2.ResourceInfo(
            resource_type=error.resource_type, resource_name=error.resource_name, description=error.message
        )
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.reason.lower(), description=error.message)
        yield quota
    if error.code is grpc.StatusCode.FAILED_PRECONDITION:
        precondition = error_details_pb2.PreconditionFailure()
        precondition.violations.add(type=error.reason, subject="session", description=error.message)
        yield precondition


def _leaves(root: type[errors.CorollaError]) -> Iterator[type[errors.CorollaError]]:
    yield root
    for child in root.__subclasses__():
        yield from _leaves(child)


_CLASS_BY_REASON: dict[str, type[errors.CorollaError]] = {}
for _class in _leaves(errors.CorollaError):
    _CLASS_BY_REASON.setdefault(_class.reason, _class)


def from_reason(
    reason: str, text: str, metadata: dict[str, str] | None = None, retry_after_s: float | None = None
) -> errors.CorollaError:
    """Returns the error that a peer reported by its reason; an unknown reason gives an InternalError."""
    cls = _CLASS_BY_REASON.get(reason, errors.InternalError)
    error = cls.__new__(cls)
    facts = dict(metadata or {})
    # The caller gets the metadata, and must not learn addresses.
    address = facts.pop("address", "")
    errors.CorollaError.__init__(error, text, metadata=facts, retry_after_s=retry_after_s)
    if isinstance(error, errors.PositionGap):
        held = facts.get("num_cached_tokens", "")
        error.held = int(held) if held.isdecimal() else 0
    elif isinstance(error, errors.HopUnavailable):
        error.address = address
    return error


def from_rpc_error(failure: grpc.RpcError) -> errors.CorollaError:
    """Returns the error of a failed call to a router: the router's own error, or the failure to reach it in time."""
    if (status := status_of(failure)) is not None:
        return parse_status(status)
    if isinstance(failure, grpc.aio.AioRpcError) and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded("the call took longer than its deadline")
    return errors.RouterUnavailable("the peer is not reachable")


def parse_status(status: status_pb2.Status) -> errors.CorollaError:
    """Returns the error that `to_status` converted; unknown details are ignored."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    resource = error_details_pb2.ResourceInfo()
    retry = error_details_pb2.RetryInfo()
    has_retry = False
    for detail in status.details:
        for target in (info, bad_request, resource):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
        if detail.Is(retry.DESCRIPTOR):
            has_retry = detail.Unpack(retry)
    retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if has_retry else None
    error = from_reason(info.reason, status.message, dict(info.metadata), retry_after_s)
    if isinstance(error, errors.InvalidRequest):
        error.violations = tuple((each.field, each.description) for each in bad_request.field_violations)
    elif isinstance(error, errors.ResourceNotFound):
        error.resource_name = resource.resource_name
    return error


def status_of(failure: grpc.RpcError) -> status_pb2.Status | None:
    """Returns the status that a handler sent with `trailing_metadata`; None: no handler sent one."""
    metadata = failure.trailing_metadata() if isinstance(failure, grpc.Call | grpc.aio.AioRpcError) else None
    for key, value in metadata or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            return status if status.code != code_pb2.OK else None
    return None
