"""The error tree: the exception classes of all services.

Every failure that leaves a room (a package of `corolla`) is one of these classes. A class has one gRPC code and one
reason: its own name in capitals, without `Error`, unless its head gives another one. The reason is the label in the
status detail (`google.rpc.ErrorInfo.reason`), in the metric `corolla_errors_total{reason}` and in the log line;
`http/errors` chooses the status over HTTP. Messages are written for the caller: they never hold prompt text, exception
text or a session id.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from grpc import StatusCode

DOMAIN = "corolla.dev"

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class CorollaError(Exception):
    """The base class of the tree. A class says in its head what differs from the class above it.

    Args:
        message: One sentence for the caller.
        metadata: Facts for programs (`ErrorInfo.metadata`), for example `uncovered_blocks`.
        retry_after_s: The seconds after which the same call may succeed. None: the default of the class. Without
            either, a retry does not help.
    """

    code: ClassVar[StatusCode] = StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retry_after_default_s: ClassVar[float | None] = None
    is_callers_fault: ClassVar[bool] = False
    """The caller caused the failure. Service level objectives do not count such failures."""

    def __init_subclass__(
        cls,
        code: StatusCode | None = None,
        reason: str = "",
        retry_after_s: float | None = None,
        is_callers_fault: bool | None = None,
    ) -> None:
        cls.reason = reason or _WORD.sub("_", cls.__name__.removesuffix("Error")).upper()
        given = {"code": code, "retry_after_default_s": retry_after_s, "is_callers_fault": is_callers_fault}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = self.retry_after_default_s if retry_after_s is None else retry_after_s


class InternalError(CorollaError):
    """A bug in Corolla. The caller learns no more than that."""


class NotComputed(CorollaError, reason="INTERNAL"):
    """A hop cannot compute a row; the subclass says why. Another hop may succeed, and other rows are not affected.

    `address` is the hop's address, if known.
    """

    address = ""


class NonFiniteOutput(NotComputed, reason="NON_FINITE"):
    """A block produced NaN or Inf, from which no token is chosen."""


class StepFailed(NotComputed):
    """Computing a row raised an exception: the device failed, or Corolla has a bug."""


class OutOfMemory(NotComputed, code=StatusCode.RESOURCE_EXHAUSTED, retry_after_s=1.0):
    """A hop has too little memory to compute a row, even alone. The status has a `google.rpc.QuotaFailure`.

    `block_server/batch_executor` reports it.
    """


class RequestKillsServers(CorollaError):
    """Several servers died of the same step, one after the other, so no further server tries it."""


# --- the caller's fault: refused before any hop is called, never retried -------------------------------------------


class InvalidRequest(CorollaError, code=StatusCode.INVALID_ARGUMENT, is_callers_fault=True):
    """A field is missing, out of range or contradicts another. The status has a `google.rpc.BadRequest`."""

    violations: Sequence[tuple[str, str]] = ()

    def __init__(self, field: str, description: str, *more: tuple[str, str]) -> None:
        self.violations = ((field, description), *more)
        super().__init__("; ".join(f"{name}: {text}" for name, text in self.violations))


class MalformedMessage(InvalidRequest):
    """The bytes are not a message of the type that the method expects."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt and the new tokens together exceed the model's context."""


class ReplyTooLarge(InvalidRequest):
    """The reply could be larger than the service sends, or than its caller receives."""


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


class MessageTooLarge(CorollaError, code=StatusCode.RESOURCE_EXHAUSTED, is_callers_fault=True):
    """The request is larger than the service's limit. The status has a `google.rpc.QuotaFailure`.

    `chassis/handlers` reports it to callers over gRPC, `http/exchange` to callers over HTTP.
    """


class Unauthenticated(CorollaError, code=StatusCode.UNAUTHENTICATED, is_callers_fault=True):
    """The caller shows no key, token or certificate that is valid."""


class QuotaExceeded(CorollaError, code=StatusCode.RESOURCE_EXHAUSTED, retry_after_s=60.0, is_callers_fault=True):
    """The caller's tenant has used up a quota, named in `metadata["quota"]`.

    `router/quotas` and `router/sessions` raise it, and `client/quotas` while no router answers. The status has a
    `google.rpc.QuotaFailure`.
    """

    @classmethod
    def used_up(cls, quota: str, wait_s: float) -> Self:
        """Returns the error for a used-up `quota`.

        Args:
            wait_s: The seconds until enough of the quota is free again; 0: it is free when a running use ends.
        """
        return cls(
            f"the tenant has used all that it may of {quota}",
            metadata={"quota": quota},
            retry_after_s=math.ceil(wait_s * 1000) / 1000 or 1.0,
        )


class ScopeDenied(CorollaError, code=StatusCode.PERMISSION_DENIED, is_callers_fault=True):
    """A caller's key does not allow this call or this model."""


class AdapterDenied(CorollaError, code=StatusCode.PERMISSION_DENIED, is_callers_fault=True):
    """The requested adapter is registered for other tenants only."""


class RoleDenied(CorollaError, code=StatusCode.PERMISSION_DENIED, is_callers_fault=True):
    """The role of a service or program does not allow this call; see `trust/authorisation`."""


class AddressNotYours(RoleDenied):
    """A block server registers at an address, or acts for a server, that its certificate does not allow."""


class CapabilityDenied(RoleDenied):
    """The opening or handover of a session lacks a capability that a client service or library signed for it.

    `trust/capabilities` says what a capability is.
    """


class ResourceNotFound(CorollaError, code=StatusCode.NOT_FOUND, reason="NOT_FOUND", is_callers_fault=True):
    """A resource does not exist or belongs to another owner; the caller must not learn which of the two.

    The status has a `google.rpc.ResourceInfo`. `field` is the request's field that names the resource, if one does.
    """

    resource_type: ClassVar[str] = "resource"
    resource_name = ""
    field = ""

    def __init__(self, message: str, resource_name: str = "", field: str = "") -> None:
        super().__init__(message)
        self.resource_name = resource_name
        self.field = field or self.field


class ModelNotFound(ResourceNotFound):
    resource_type = "model"
    field = "model"


class SessionNotFound(ResourceNotFound):
    resource_type = "session"
    field = "session_id"


class AdapterNotFound(ResourceNotFound):
    """The adapter is not registered, or not any more."""

    resource_type = "adapter"
    field = "adapter"


class MethodNotAllowed(CorollaError, code=StatusCode.UNIMPLEMENTED, is_callers_fault=True):
    """A service of gRPC, or a path of HTTP, does not have the method of a call."""


class LeaseLost(CorollaError, code=StatusCode.NOT_FOUND):
    """The router does not know this block server, and the call has too little information to register it."""


class LeaseTaken(LeaseLost):
    """Another block server, which started later, has this one's address."""


class SessionBusy(CorollaError, code=StatusCode.ABORTED, retry_after_s=1.0, is_callers_fault=True):
    """Another turn is running on the session."""


# --- no room: nothing was allocated -------------------------------------------------------------------------------


class OutOfPages(CorollaError, code=StatusCode.RESOURCE_EXHAUSTED, retry_after_s=1.0):
    """A hop cannot reserve the pages of KV cache that the session needs in the worst case.

    `block_server/sessions` raises it, and `planning/planner` before any hop is asked. The status has a
    `google.rpc.QuotaFailure`.
    """


class NoAdapterRoom(OutOfPages):
    """A hop's memory for adapters is full, and running sessions use all adapters in it: see `block_server/adapters`."""


class QueueFull(CorollaError, code=StatusCode.RESOURCE_EXHAUSTED, retry_after_s=1.0):
    """Too many callers wait for the same thing.

    `client/generation/waiting_line` raises it when too many requests wait until their answers may run. In the client
    service, `client/held_bytes`, `http/placement_stream` and the processes in `client/text` raise it, too;
    on hops `scheduler`, `pending_opens`, `adapters` and `chassis/fair_lock` (grammars); on routers `router/watch`.
    """


class ShareExceeded(QueueFull, reason="QUEUE_FULL", is_callers_fault=True):
    """The caller's tenant has more than its share of a full service. The caller sees it as QueueFull."""


# --- the chain ----------------------------------------------------------------------------------------------------


class PositionGap(CorollaError, code=StatusCode.FAILED_PRECONDITION):
    """A hop holds fewer tokens (`held`) than the step assumes. The status has a `google.rpc.PreconditionFailure`."""

    def __init__(self, message: str, held: int) -> None:
        super().__init__(message, metadata={"num_cached_tokens": str(held)})
        self.held = held


class StaleEpoch(CorollaError, code=StatusCode.ABORTED):
    """The server discards a frame because it belongs to an epoch before the session's last opening."""


class HopSessionLost(CorollaError, code=StatusCode.FAILED_PRECONDITION):
    """A hop does not know the session: it was never opened there, it is closed, or its lease ran out."""


class OutputsNotKept(CorollaError, code=StatusCode.FAILED_PRECONDITION):
    """A hop no longer has the outputs that it should send again; they must be computed again."""


class FingerprintMismatch(CorollaError, code=StatusCode.FAILED_PRECONDITION):
    """A server has weights with another fingerprint than the chain; a chain never mixes two."""


class NoChain(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=2.0):
    """Some blocks have no live server. Metadata `uncovered_blocks` names them."""


class HopUnavailable(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=1.0):
    """The connection between two services failed. `address` is the failed hop, if known; the caller never learns it."""

    reporter = ""
    """The hop that could not reach `address`; empty if this process' own stream broke."""

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class RouteUnknown(HopUnavailable):
    """A hop refused to send a step or a session to an address that its placement does not contain.

    No server has failed: the server at `address` may have joined while the hop could not reach a router.
    """


class HopLate(HopUnavailable):
    """A session's token is late and the hop at `address` is silent, so the hop's standby takes the session.

    The server may still serve others.
    """

    is_repeated = False
    """The server was silent for as long a short while ago."""


class HopLeaving(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=1.0):
    """The block server at `address` drains: it takes no new sessions, and its sessions go to others. It is healthy."""

    address = ""


class AdapterNotLoaded(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=5.0):
    """A hop cannot load an adapter: its files are missing, differ from the registered ones, or do not fit the model."""


class ChecksumMismatch(CorollaError, code=StatusCode.DATA_LOSS):
    """The bytes of a handover were corrupted on the way; the sender sends them again."""


class ServiceStopping(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=1.0):
    """The service ends, and takes no new call."""


class RouterUnavailable(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=1.0):
    """No router answers."""


class ServiceUnavailable(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=1.0):
    """The called service cannot be reached, or its connection broke during the call."""


class StoreUnavailable(CorollaError, code=StatusCode.UNAVAILABLE, retry_after_s=1.0):
    """Redis does not answer, or refuses to write; or a folder with a stack's state does, such as on a full disk."""


class DeadlineExceeded(CorollaError, code=StatusCode.DEADLINE_EXCEEDED):
    """The time that the caller gave is over."""


class CallerStalled(DeadlineExceeded, is_callers_fault=True):
    """The caller stayed connected, but read nothing of its answer for too long. It learns this when it reads again."""


class StartupError(CorollaError, code=StatusCode.FAILED_PRECONDITION):
    """A process cannot start as configured. The message says what to change, and the process ends."""


class SettingsError(StartupError):
    """A setting has a value that is not valid."""


class CheckpointError(StartupError):
    """A checkpoint is missing, incomplete, corrupt or holds pickled weights."""


class AdapterError(CheckpointError):
    """An adapter's folder is incomplete or corrupt, or holds an adapter of an unsupported kind."""


class HubUnavailable(StartupError):
    """The hub cannot be reached, or its download breaks off or is damaged. A retry may succeed."""


class UnsupportedFamily(CheckpointError):
    """Corolla does not serve models of this family."""


class ReleaseMismatch(StartupError):
    """This machine and the stack that it joins have different releases of Corolla."""


class SpanRefused(StartupError):
    """The router has no span for this server, or refuses the span that the server asked for."""
