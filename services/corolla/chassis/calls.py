"""Calls of any protocol: authentication, duration, outcome, metrics and the audit log.

A protocol (gRPC, HTTP) reads requests and writes replies in its own way. This module holds what all protocols share:
what a call is, who may make it, and what the metrics and the audit log record. A servicer's exception reaches the
caller as a CorollaError; the text of any other exception never reaches the caller.
"""

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import grpc

from corolla.chassis import audit, errors
from corolla.chassis.audit import ANONYMOUS_CALLER, Caller
from corolla.chassis.ignored_places import IGNORED, ignored_text
from corolla.chassis.metrics import Fault

log = logging.getLogger(__name__)

_DENIALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

_REQUEST_ID_HEADER: Final = "x-request-id"
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

Who = TypeVar("Who", bound=Caller)


class Context(Protocol):
    """What a protocol knows about a call and its caller. gRPC's contexts have this interface."""

    def peer(self) -> str:
        """Returns the caller's address, such as `ipv4:127.0.0.1:40000`."""

    def time_remaining(self) -> float | None:
        """Returns the seconds until the call's deadline; None: it has no deadline."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Returns the request's metadata or headers, with names in lower case."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns the properties of the caller's certificate; empty without one."""

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...], /) -> None:
        """Sets the names and values that the caller gets after the reply."""


def x_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the caller's own id of its call; empty if it is missing or not 1 to 128 visible ASCII characters."""
    given = next((value for key, value in metadata or () if key == _REQUEST_ID_HEADER), "")
    return given if isinstance(given, str) and _REQUEST_ID.fullmatch(given) else ""


class Holding(Protocol):
    """Counts the bytes of one call's request and reply, which its service holds."""

    def take(self, num_bytes: int) -> None:
        """Counts bytes of the request. Raises QueueFull if the service holds too many."""

    def expect_reply(self, num_bytes: int) -> None:
        """Counts bytes that the reply will surely have. Raises QueueFull if the service holds too many."""

    def add_reply(self, num_bytes: int) -> None:
        """Counts bytes of the reply that are there now."""

    def let_go(self) -> None:
        """Counts none of the call's bytes any more."""


class _Uncounted:
    def take(self, num_bytes: int) -> None:
        pass

    expect_reply = add_reply = take

    def let_go(self) -> None:
        pass


UNCOUNTED: Final[Holding] = _Uncounted()
"""What a service that counts no bytes has."""


class Call(Generic[Who]):
    """One call, as a servicer gets it.

    Attributes:
        method: `Service/Method`, or the method and path of HTTP.
        caller: The caller; ANONYMOUS_CALLER until it is authenticated.
        failure: The error with which the call ends if its task is cancelled; None: the caller cancelled the call.
        started_s: The time at which the call began, by `time.perf_counter`.
        note: What the protocol wants to find again with a turn that the call makes; at most a few KiB.
        held: Counts the bytes of the call's request and reply.
        is_recorded: Whether the audit log may record the call's failure; a flood that is turned away is only counted.
    """

    def __init__(self, method: str, context: Context, caller: Who) -> None:
        self.method = method
        self.context = context
        self.caller = caller
        self.failure: errors.CorollaError | None = None
        self.started_s = time.perf_counter()
        self.note = b""
        self.held: Holding = UNCOUNTED
        self.is_recorded = True
        self._described: list[Callable[[], Mapping[str, Any]]] = []

    def describe(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Adds facts to the call's audit line; `facts` is called at the end of the call.

        The facts are numbers and names, never a part of the request. Numbers of the same name are added up.
        """
        self._described.append(facts)

    def name_ignored(self, places: Sequence[str]) -> None:
        """Tells the caller which places of its request have no effect."""
        if places:
            self.context.set_trailing_metadata(((IGNORED, ignored_text(places)),))

    def write(self, outcome: str, seconds: float) -> None:
        """Writes the call into the audit log."""
        facts = {"method": self.method, "outcome": outcome, "seconds": round(seconds, 3), "peer": self.context.peer()}
        if name := x_request_id(self.context.invocation_metadata()):
            facts["x_request_id"] = name
        described: dict[str, Any] = {}
        for each in self._described:
            for name, value in each().items():
                described[name] = described[name] + value if isinstance(described.get(name), int) else value
        audit.write("call", {**facts, **self.caller.audited(), **described})


Authenticate = Callable[[Call[Any]], Awaitable[None]]
"""A function that is called before the request is read. It sets the call's caller or raises a CorollaError."""

Outcome = errors.CorollaError | Literal["OK", "CANCELLED"]


class CallMetrics(Protocol):
    """The metrics that a protocol counts."""

    def done(self, method: str, outcome: Outcome, seconds: float, fault: Fault = "none") -> None: ...

    def error(self, reason: str) -> None: ...


@dataclass(eq=False, repr=False)
class Guard:
    """Guards one method of one protocol: authenticates callers, counts and times calls, converts exceptions to errors.

    Args:
        method: The method's name in metrics and in the audit log.
        authenticate: The function that authenticates callers; None: callers are not authenticated.
        is_audited: Whether each call is in the audit log; denied calls are there in any case.
    """

    method: str
    metrics: CallMetrics
    authenticate: Authenticate | None
    _: KW_ONLY
    is_audited: bool

    def begin(self, context: Context) -> Call[Any]:
        """Returns a new call whose caller is not authenticated yet."""
        return Call(self.method, context, ANONYMOUS_CALLER)

    async def let_in(self, call: Call[Any]) -> None:
        """Authenticates the caller. Raises what `authenticate` raises."""
        if self.authenticate is not None:
            await self.authenticate(call)

    def done(self, call: Call[Any]) -> None:
        """Records that the call has its reply."""
        seconds = time.perf_counter() - call.started_s
        self.metrics.done(self.method, "OK", seconds)
        if self.is_audited:
            call.write("OK", seconds)

    def stalled(self) -> None:
        """Records that a caller does not read its answer; its call ends when the caller reads again or disconnects."""
        log.warning("a caller does not read its answer", extra={"method": self.method})
        self.metrics.error(errors.CallerStalled.reason)

    def failed(self, call: Call[Any], failure: BaseException) -> errors.CorollaError | None:
        """Records a call that ended with an exception, and returns the error for the caller; None: the caller left."""
        seconds = time.perf_counter() - call.started_s
        if isinstance(failure, asyncio.CancelledError) and call.failure is not None:
            failure = call.failure
        if isinstance(failure, asyncio.CancelledError):
            self.metrics.done(self.method, "CANCELLED", seconds, "caller")
            if self.is_audited:
                call.write("CANCELLED", seconds)
            return None
        if isinstance(failure, errors.CorollaError):
            error = failure
        elif not isinstance(failure, KeyboardInterrupt | SystemExit | GeneratorExit):
            # Rust code that panics raises no Exception.
            log.error("unexpected failure", extra={"method": self.method, "where": call_path(failure)})
            error = errors.InternalError("internal error")
        else:
            return None
        fault: Fault = "caller" if error.is_callers_fault else "service"
        self.metrics.done(self.method, error, seconds, fault)
        if not isinstance(error, errors.CallerStalled):  # `stalled` has counted it
            self.metrics.error(error.reason)
        if call.is_recorded and (self.is_audited or error.code in _DENIALS):
            call.write(error.reason, seconds)
        return error


def call_path(failure: BaseException) -> str:
    """Returns the type and call path of an exception without its text, which might quote a prompt."""
    frames = traceback.extract_tb(failure.__traceback__)
    path = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(failure).__name__} at {path}"
