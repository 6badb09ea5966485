"""The error tree: the exception classes of all services.

Every failure that leaves a room (a package of `corolla`) is one of these classes. A class has one gRPC code and one
reason. The reason is the label in the status detail (`google.rpc.ErrorInfo.reason`), in the metric
`corolla_errors_total{reason}` and in the log line; `http/errors` chooses the status over HTTP. Messages are
written for the caller: they never hold prompt text, exception text or a session id.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import grpc

DOMAIN = "corolla.dev"


class CorollaError(Exception):
    """The base class of the tree.

    Args:
        message: One sentence for the caller.
        metadata: Facts for programs (`ErrorInfo.metadata`), for example `uncovered_blocks`.
        retry_after_s: The seconds after which the same call may succeed. None: the default of the class. A retry
            cannot help if the class has none either.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retry_after_default_s: ClassVar[float | None] = None
    is_callers_fault: ClassVar[bool] = False
    """Whether the caller caused the failure. Service level objectives do not count such failures."""

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = self.retry_after_default_s if retry_after_s is None else retry_after_s


class InternalError(CorollaError):
    """A bug in Corolla. The caller learns no more than that."""


class NotComputed(CorollaError):
    """A hop cannot compute a row; the subclass says why. Another hop may succeed, and other rows are not affected.

    `address` is the hop's address, if known.
    """

    address = ""


class NonFiniteOutput(NotComputed):
    """A block produced NaN or Inf, from which no token is chosen."""

    reason = "NON_FINITE"


class StepFailed(NotComputed):
    """Computing a row raised an exception: the device failed, or Corolla has a bug."""

    reason = "STEP_FAILED"


class OutOfMemory(NotComputed):
    """A hop has too little memory to compute a row, even alone. The status has a `google.rpc.QuotaFailure`.

    `block_server/batch_executor` reports it.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_MEMORY"
    retry_after_default_s = 1.0


class RequestKillsServers(CorollaError):
    """Several servers died of the same step, one after the other, so no further server tries it."""

    reason = "REQUEST_KILLS_SERVERS"


# --- the caller's fault: refused before any hop is called, never retried -------------------------------------------


class InvalidRequest(CorollaError):
    """A field is missing, out of range or contradicts another. The status has a `google.rpc.BadRequest`."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"
    is_callers_fault = True
    violations: Sequence[tuple[str, str]] = ()

    def __init__(self, field: str, description: str, *more: tuple[str, str]) -> None:
        self.violations = ((field, description), *more)
        super().__init__("; ".join(f"{name}: {text}" for name, text in self.violations))


class MalformedMessage(InvalidRequest):
    """The bytes are not a message of the type that the method expects."""

    reason = "MALFORMED_MESSAGE"


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the new tokens together exceed the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class ReplyTooLarge(InvalidRequest):
    """The reply could be larger than the service sends, or than its caller receives."""

    reason = "REPLY_TOO_LARGE"


def context_exceeded(context_length: int, num_prompt_tokens: int | None) -> ContextLengthExceeded:
    """The error of a prompt that is too long, or that leaves no room for an answer.

    Programs look for the first sentence, which is OpenAI's.

    Args:
        num_prompt_tokens: None: more than the context; their number is not known.
    """
    counted = "more than that" if num_prompt_tokens is None else f"{num_prompt_tokens} tokens"
    rest = ", which leaves no room for an answer" if num_prompt_tokens == context_length else ""
    limit = f"This model's maximum context length is {context_length} tokens. The prompt has {counted}{rest}"
    error = ContextLengthExceeded("prompt", limit)
    error.metadata["context_length"] = str(context_length)
    if num_prompt_tokens is not None:
        error.metadata["prompt_tokens"] = str(num_prompt_tokens)
    return error


class MessageTooLarge(CorollaError):
    """The request is larger than the service's limit. The status has a `google.rpc.QuotaFailure`.

    `chassis/handlers` reports it to callers over gRPC, `http/exchange` to callers over HTTP.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "MESSAGE_TOO_LARGE"
    is_callers_fault = True


class Unauthenticated(CorollaError):
    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"
    is_callers_fault = True


class QuotaExceeded(CorollaError):
    """The caller's tenant has used up a quota, named in `metadata["quota"]`.

    `router/quotas` and `router/sessions` raise it, and `client/quotas` while no router answers. The status has a
    `google.rpc.QuotaFailure`.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"
    retry_after_default_s = 60.0
    is_callers_fault = True

    @classmethod
    def of(cls, quota: str, wait_s: float) -> Self:
        """Returns the error for a used-up `quota`.

        Args:
            wait_s: The seconds until enough of the quota is free again; 0: it is free when a running use ends.
        """
        return cls(
            f"the tenant has used all that it may of {quota}",
            metadata={"quota": quota},
            retry_after_s=math.ceil(wait_s * 1000) / 1000 or 1.0,
        )


class ScopeDenied(CorollaError):
    """A caller's key does not allow this call or this model."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "SCOPE_DENIED"
    is_callers_fault = True


class AdapterDenied(CorollaError):
    """The requested adapter is registered for other tenants only."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "ADAPTER_DENIED"
    is_callers_fault = True


class RoleDenied(CorollaError):
    """The role of a service or program does not allow this call; see `trust/authorisation`."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "ROLE_DENIED"
    is_callers_fault = True


class AddressNotYours(RoleDenied):
    """A block server registers at an address, or acts for a server, that its certificate does not allow."""

    reason = "ADDRESS_NOT_YOURS"


class CapabilityDenied(RoleDenied):
    """The opening or handover of a session lacks a capability that a client service or library signed for it.

    `trust/capabilities` says what a capability is.
    """

    reason = "CAPABILITY_DENIED"


class ResourceNotFound(CorollaError):
    """A resource does not exist or belongs to another owner; the caller must not learn which of the two.

    The status has a `google.rpc.ResourceInfo`. `field` is the request's field that names the resource, if one does.
    """

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"
    is_callers_fault = True
    resource_type: ClassVar[str] = "resource"
    resource_name = ""
    field = ""

    def __init__(self, message: str, resource_name: str = "", field: str = "") -> None:
        super().__init__(message)
        self.resource_name = resource_name
        self.field = field or self.field


class ModelNotFound(ResourceNotFound):
    reason = "MODEL_NOT_FOUND"
    resource_type = "model"
    field = "model"


class SessionNotFound(ResourceNotFound):
    reason = "SESSION_NOT_FOUND"
    resource_type = "session"
    field = "session_id"


class AdapterNotFound(ResourceNotFound):
    """The adapter is not registered, or not any more."""

    reason = "ADAPTER_NOT_FOUND"
    resource_type = "adapter"
    field = "adapter"


class MethodNotAllowed(CorollaError):
    """A service of gRPC, or a path of HTTP, does not have the method of a call."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "METHOD_NOT_ALLOWED"
    is_callers_fault = True


class LeaseLost(CorollaError):
    """The router does not know this block server, and the call has too little information to register it."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "LEASE_LOST"


class LeaseTaken(LeaseLost):
    """Another block server, which started later, has this one's address."""

    reason = "LEASE_TAKEN"


class SessionBusy(CorollaError):
    """Another turn is running on the session."""

    code = grpc.StatusCode.ABORTED
    reason = "SESSION_BUSY"
    is_callers_fault = True
    retry_after_default_s = 1.0


# --- no room: nothing was allocated -------------------------------------------------------------------------------


class OutOfPages(CorollaError):
    """A hop cannot reserve the pages of KV cache that the session needs in the worst case.

    `block_server/sessions` raises it, and `planning/planner` before any hop is asked. The status has a
    `google.rpc.QuotaFailure`.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_PAGES"
    retry_after_default_s = 1.0


class NoAdapterRoom(OutOfPages):
    """A hop's memory for adapters is full, and running sessions use all adapters in it: see `block_server/adapters`."""

    reason = "NO_ADAPTER_ROOM"


class QueueFull(CorollaError):
    """Too many callers wait for the same thing.

    `client/generation/waiting_line` raises it when too many requests wait until their answers may run. In the client
    service, `client/held_bytes`, `http/placement_stream` and the processes in `client/text` raise it, too;
    on hops `scheduler`, `pending_opens`, `adapters` and `chassis/fair_lock` (grammars); on routers `router/watch`.
    """

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"
    retry_after_default_s = 1.0


class ShareExceeded(QueueFull):
    """The caller's tenant has more than its share of a full service. The caller sees it as QueueFull."""

    is_callers_fault = True


# --- the chain ----------------------------------------------------------------------------------------------------


class PositionGap(CorollaError):
    """A hop holds fewer tokens (`held`) than the step assumes. The status has a `google.rpc.PreconditionFailure`."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "POSITION_GAP"

    def __init__(self, message: str, held: int) -> None:
        super().__init__(message, metadata={"num_cached_tokens": str(held)})
        self.held = held


class StaleEpoch(CorollaError):
    """The server discards a frame because it belongs to an epoch before the session's last opening."""

    code = grpc.StatusCode.ABORTED
    reason = "STALE_EPOCH"


class HopSessionLost(CorollaError):
    """A hop does not know the session: it was never opened there, it is closed, or its lease ran out."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "HOP_SESSION_LOST"


class OutputsNotKept(CorollaError):
    """A hop no longer has the outputs that it should send again; they must be computed again."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "OUTPUTS_NOT_KEPT"


class FingerprintMismatch(CorollaError):
    """A server has weights with another fingerprint than the chain; a chain never mixes two."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FINGERPRINT_MISMATCH"


class NoChain(CorollaError):
    """Some blocks have no live server. Metadata `uncovered_blocks` names them."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_CHAIN"
    retry_after_default_s = 2.0


class HopUnavailable(CorollaError):
    """The connection between two services failed. `address` is the failed hop, if known; the caller never learns it."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "HOP_UNAVAILABLE"
    retry_after_default_s = 1.0

    reporter = ""
    """The hop that could not reach `address`; empty if this process' own stream broke."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class RouteUnknown(HopUnavailable):
    """A hop refused to send a step or a session to an address that its placement does not contain.

    No server has failed: the server at `address` may have joined while the hop could not reach a router.
    """

    reason = "ROUTE_UNKNOWN"


class HopLeaving(CorollaError):
    """The block server at `address` drains: it takes no new sessions, and its sessions go to others. It is healthy."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "HOP_LEAVING"
    retry_after_default_s = 1.0
    address = ""


class AdapterNotLoaded(CorollaError):
    """A hop cannot load an adapter: its files are missing, differ from the registered ones, or do not fit the model."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ADAPTER_NOT_LOADED"
    retry_after_default_s = 5.0


class ChecksumMismatch(CorollaError):
    """The bytes of a handover were corrupted on the way; the sender sends them again."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "CHECKSUM_MISMATCH"


class ServiceStopping(CorollaError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "SERVICE_STOPPING"
    retry_after_default_s = 1.0


class RouterUnavailable(CorollaError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "ROUTER_UNAVAILABLE"
    retry_after_default_s = 1.0


class ServiceUnavailable(CorollaError):
    """The called service cannot be reached, or its connection broke during the call."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SERVICE_UNAVAILABLE"
    retry_after_default_s = 1.0


class StoreUnavailable(CorollaError):
    """Redis does not answer, or refuses to write."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STORE_UNAVAILABLE"
    retry_after_default_s = 1.0


class DeadlineExceeded(CorollaError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class CallerStalled(DeadlineExceeded):
    """The caller stayed connected, but read nothing of its answer for too long. It learns this when it reads again."""

    reason = "CALLER_STALLED"
    is_callers_fault = True


class StartupError(CorollaError):
    """A process cannot start as configured. The message says what to change, and the process ends."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STARTUP"


class SettingsError(StartupError):
    reason = "SETTINGS"


class CheckpointError(StartupError):
    """A checkpoint is missing, incomplete, corrupt or holds pickled weights."""

    reason = "CHECKPOINT"


class AdapterError(CheckpointError):
    """An adapter's folder is incomplete or corrupt, or holds an adapter of an unsupported kind."""

    reason = "ADAPTER"


class HubUnavailable(StartupError):
    """The hub cannot be reached, or its download breaks off or is damaged. A retry may succeed."""

    reason = "HUB_UNAVAILABLE"


class UnsupportedFamily(CheckpointError):
    reason = "UNSUPPORTED_FAMILY"


class SpanRefused(StartupError):
    """The router has no span for this server, or refuses the span that the server asked for."""

    reason = "SPAN_REFUSED"
