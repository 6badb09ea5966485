"""The one error tree.

Every failure that leaves a room is one of these classes. A class carries one gRPC code and one reason; the reason is
the label in the status detail (`google.rpc.ErrorInfo.reason`), in the metric `corolla_errors_total{reason}` and in the
log line. Messages are written for the caller: they never hold prompt text, exception text or a session id.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import grpc

DOMAIN = "corolla.dev"


class CorollaError(Exception):
    """Base of the tree.

    Args:
        message: one sentence for the caller.
        metadata: facts for programs (`ErrorInfo.metadata`), for example `uncovered_blocks`.
        retry_after_s: seconds after which the same call may succeed; None when a retry cannot help.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retry_after_default_s: ClassVar[float | None] = None
    is_callers_fault: ClassVar[bool] = False
    """Whether the service did what it should by failing the call: nothing that its objectives count."""

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = self.retry_after_default_s if retry_after_s is None else retry_after_s


class InternalError(CorollaError):
    """A fault of our own. The caller learns nothing but that."""


class NotComputed(CorollaError):
    """A hop has no output for a row, and says why by the class. Another hop may have one; the same row fails alone.

    `address` is the hop, if known.
    """

    address = ""


class NonFiniteOutput(NotComputed):
    """A block produced NaN or Inf; no token is made of it."""

    reason = "NON_FINITE"


class StepFailed(NotComputed):
    """Computing a row raised an exception: a device that fails, or a bug of ours."""

    reason = "STEP_FAILED"


class OutOfMemory(NotComputed):
    """A hop's memory does not suffice to compute a row, not even by itself. Becomes `google.rpc.QuotaFailure`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_MEMORY"
    retry_after_default_s = 1.0


class RequestKillsServers(CorollaError):
    """Servers died of the same step, one after the other; it is not tried on a further one."""

    reason = "REQUEST_KILLS_SERVERS"


# --- the caller's fault: refused before any hop is called, never retried -------------------------------------------


class InvalidRequest(CorollaError):
    """A field is missing, out of range or contradicts another. Becomes `google.rpc.BadRequest`."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"
    is_callers_fault = True
    violations: Sequence[tuple[str, str]] = ()

    def __init__(self, field: str, description: str, *more: tuple[str, str]) -> None:
        self.violations = ((field, description), *more)
        super().__init__("; ".join(f"{name}: {text}" for name, text in self.violations))


class MalformedMessage(InvalidRequest):
    """The bytes are not the message that the method takes."""

    reason = "MALFORMED_MESSAGE"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus new tokens do not fit the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class MessageTooLarge(CorollaError):
    """The request is larger than the service's limit. Becomes `google.rpc.QuotaFailure`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "MESSAGE_TOO_LARGE"
    is_callers_fault = True


class Unauthenticated(CorollaError):
    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"
    is_callers_fault = True


class QuotaExceeded(CorollaError):
    """The caller's tenant has all that it may; `metadata["quota"]` says of what. Becomes `google.rpc.QuotaFailure`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"
    retry_after_default_s = 60.0
    is_callers_fault = True

    @classmethod
    def of(cls, quota: str, wait_s: float) -> Self:
        """Of `quota` there is enough again in `wait_s`; 0: when something that holds a part of it ends."""
        return cls(
            f"the tenant has used all that it may of {quota}",
            metadata={"quota": quota},
            retry_after_s=math.ceil(wait_s * 1000) / 1000 or 1.0,
        )


class ScopeDenied(CorollaError):
    """A caller's key is for other calls, or other models."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "SCOPE_DENIED"
    is_callers_fault = True


class AdapterDenied(CorollaError):
    """An adapter is registered for other tenants."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "ADAPTER_DENIED"
    is_callers_fault = True


class RoleDenied(CorollaError):
    """A service or program may not ask for this, whoever it is; see `trust/authorisation`."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "ROLE_DENIED"
    is_callers_fault = True


class AddressNotYours(RoleDenied):
    """A block server registers at an address, or speaks for a server, that its certificate does not give it."""

    reason = "ADDRESS_NOT_YOURS"


class CapabilityDenied(RoleDenied):
    """A session is opened, or handed over, without the word of a client service or library for just that."""

    reason = "CAPABILITY_DENIED"


class ResourceNotFound(CorollaError):
    """Becomes `google.rpc.ResourceInfo`. A foreign owner's resource is not found, too: existence is not disclosed."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"
    is_callers_fault = True
    resource_type: ClassVar[str] = "resource"
    resource_name = ""

    def __init__(self, message: str, resource_name: str = "") -> None:
        super().__init__(message)
        self.resource_name = resource_name


class ModelNotFound(ResourceNotFound):
    reason = "MODEL_NOT_FOUND"
    resource_type = "model"


class SessionNotFound(ResourceNotFound):
    reason = "SESSION_NOT_FOUND"
    resource_type = "session"


class AdapterNotFound(ResourceNotFound):
    """No such adapter is registered, or it was taken out since."""

    reason = "ADAPTER_NOT_FOUND"
    resource_type = "adapter"


class LeaseLost(CorollaError):
    """The router does not know this block server, and does not know enough to register it."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "LEASE_LOST"


class LeaseTaken(LeaseLost):
    """Another block server, the newer incarnation, has this one's address."""

    reason = "LEASE_TAKEN"


class SessionBusy(CorollaError):
    """Another turn is running on the session."""

    code = grpc.StatusCode.ABORTED
    reason = "SESSION_BUSY"
    is_callers_fault = True
    retry_after_default_s = 1.0


# --- no room: nothing was allocated -------------------------------------------------------------------------------


class OutOfPages(CorollaError):
    """A hop cannot reserve the pages that the session needs in the worst case. Becomes `google.rpc.QuotaFailure`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OUT_OF_PAGES"
    retry_after_default_s = 1.0


class NoAdapterRoom(OutOfPages):
    """A hop's memory for adapters is full of those that running sessions use."""

    reason = "NO_ADAPTER_ROOM"


class QueueFull(CorollaError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"
    retry_after_default_s = 1.0


class ShareExceeded(QueueFull):
    """The caller's tenant alone has more than its share of a full service. To the caller it is any QueueFull."""

    is_callers_fault = True


# --- the chain ----------------------------------------------------------------------------------------------------


class PositionGap(CorollaError):
    """A hop holds fewer tokens than the step assumes: `held`. Becomes `google.rpc.PreconditionFailure`."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "POSITION_GAP"

    def __init__(self, message: str, held: int) -> None:
        super().__init__(message, metadata={"num_cached_tokens": str(held)})
        self.held = held


class StaleEpoch(CorollaError):
    """The session was reopened since; this frame belongs to an older epoch and is discarded."""

    code = grpc.StatusCode.ABORTED
    reason = "STALE_EPOCH"


class HopSessionLost(CorollaError):
    """A hop does not know the session: never opened there, closed, or its lease ran out."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "HOP_SESSION_LOST"


class OutputsNotKept(CorollaError):
    """A hop no longer has the outputs that it is to send again; they must be computed."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "OUTPUTS_NOT_KEPT"


class FingerprintMismatch(CorollaError):
    """A chain never mixes two fingerprints."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FINGERPRINT_MISMATCH"


class NoChain(CorollaError):
    """Some blocks have no live server. Metadata `uncovered_blocks` names them."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NO_CHAIN"
    retry_after_default_s = 2.0


class HopUnavailable(CorollaError):
    """A transport fault between the services. `address` is the hop to blame, if known; it never reaches the caller."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "HOP_UNAVAILABLE"
    retry_after_default_s = 1.0

    reporter = ""
    """Who could not reach it; empty where our stream broke."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class RouteUnknown(HopUnavailable):
    """A step, or a session, was to go to an address that the placement does not name; nothing was sent there.

    Nobody is to blame: the server at `address` may have joined while the hop reached no router.
    """

    reason = "ROUTE_UNKNOWN"


class HopLeaving(CorollaError):
    """A block server drains: no new sessions, and its own go to others. Nobody is to blame. `address` is its own."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "HOP_LEAVING"
    retry_after_default_s = 1.0
    address = ""


class AdapterNotLoaded(CorollaError):
    """A hop cannot have an adapter: its files are missing, are not those registered, or do not fit the model."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "ADAPTER_NOT_LOADED"
    retry_after_default_s = 5.0


class ChecksumMismatch(CorollaError):
    """Bytes of a handover were changed on the way; they are sent again."""

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
    """The service that was called cannot be reached, or went away in the middle of the call."""

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
    """The caller stayed and took nothing of its answer for too long. It learns so when it reads again."""

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
    """An adapter's folder is incomplete or corrupt, or holds one of a kind that is not served."""

    reason = "ADAPTER"


class HubUnavailable(StartupError):
    """The hub cannot be reached, or what it sends breaks off or is damaged. The same may succeed later."""

    reason = "HUB_UNAVAILABLE"


class UnsupportedFamily(CheckpointError):
    reason = "UNSUPPORTED_FAMILY"


class SpanRefused(StartupError):
    """The router has no span for this server, or refuses the one that it asked for."""

    reason = "SPAN_REFUSED"
