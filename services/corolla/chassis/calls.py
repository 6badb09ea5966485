"""Calls of callers, through whichever door they come: who calls, how long it took, how it ended.

A door (gRPC, HTTP) reads requests and writes replies in its own way. What a call is, who may make it, and what metrics
and the audit log learn of it is the same for all of them, and stands here. Whatever a servicer raises leaves as an
error of the tree; an exception's own text never does.
"""

import asyncio
import logging
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import grpc

from corolla.chassis import audit, errors
from corolla.chassis.audit import ANYBODY, Caller
from corolla.chassis.metrics import Fault

log = logging.getLogger(__name__)

_DENIALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

_REQUEST_ID_HEADER: Final = "x-request-id"
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")

Who = TypeVar("Who", bound=Caller)


class Context(Protocol):
    """What a door knows of the other end. Those of gRPC are such."""

    def peer(self) -> str:
        """Its address, such as `ipv4:127.0.0.1:40000`."""

    def time_remaining(self) -> float | None:
        """Seconds for which it waits; None: it does not say."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """What came before the request, names in small letters."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What its certificate says, where it shows one."""


def x_request_id(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """By which a caller names its call; empty where it does not, or by something else than 1 to 128 visible ASCII
    characters."""
    given = next((value for key, value in metadata or () if key == _REQUEST_ID_HEADER), "")
    return given if isinstance(given, str) and _REQUEST_ID.fullmatch(given) else ""


class Call(Generic[Who]):
    """One call, as a servicer gets it.

    Attributes:
        method: `Service/Method`, or method and path of HTTP.
        caller: ANYBODY until somebody has found out who it is.
        failure: what the call ends with if its task is cancelled; None: its caller has cancelled it.
        started_s: when it began, by `time.perf_counter`.
    """

    def __init__(self, method: str, context: Context, caller: Who) -> None:
        self.method = method
        self.context = context
        self.caller = caller
        self.failure: errors.CorollaError | None = None
        self.started_s = time.perf_counter()
        self._described: list[Callable[[], Mapping[str, Any]]] = []

    def describe(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Adds facts to the call's audit line, asked at its end: numbers and names, nothing of what was asked.

        Numbers of the same name are added up.
        """
        self._described.append(facts)

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
"""Called before the request is read: sets who calls. Raises an error of the tree."""

Outcome = errors.CorollaError | Literal["OK", "CANCELLED"]


class CallMetrics(Protocol):
    """What a door counts."""

    def done(self, method: str, outcome: Outcome, seconds: float, fault: Fault = "none") -> None: ...

    def error(self, reason: str) -> None: ...


class Guard:
    """Of one method at one door: asks who calls, counts and times calls, and makes errors of exceptions.

    Args:
        authenticate: None: nobody is asked who they are.
        is_audited: whether each call is in the audit log; who was denied a call is there in any case.
    """

    def __init__(
        self, method: str, metrics: CallMetrics, authenticate: Authenticate | None, *, is_audited: bool
    ) -> None:
        self._method = method
        self._metrics = metrics
        self._authenticate = authenticate
        self._is_audited = is_audited

    def begin(self, context: Context) -> Call[Any]:
        """A call of which nothing is known yet."""
        return Call(self._method, context, ANYBODY)

    async def let_in(self, call: Call[Any]) -> None:
        """Finds out who calls. Raises what `authenticate` raises."""
        if self._authenticate is not None:
            await self._authenticate(call)

    def done(self, call: Call[Any]) -> None:
        """The call has its reply."""
        seconds = time.perf_counter() - call.started_s
        self._metrics.done(self._method, "OK", seconds)
        if self._is_audited:
            call.write("OK", seconds)

    def stalled(self) -> None:
        """A caller takes nothing of its answer; the call ends with CallerStalled when it reads again, or leaves."""
        log.warning("a caller does not take its answer", extra={"method": self._method})
        self._metrics.error(errors.CallerStalled.reason)

    def failed(self, call: Call[Any], failure: BaseException) -> errors.CorollaError | None:
        """What the caller is to learn of a call that ended with an exception; None: nobody is there to learn it."""
        seconds = time.perf_counter() - call.started_s
        if isinstance(failure, asyncio.CancelledError) and call.failure is not None:
            failure = call.failure
        if isinstance(failure, asyncio.CancelledError):
            self._metrics.done(self._method, "CANCELLED", seconds, "caller")
            if self._is_audited:
                call.write("CANCELLED", seconds)
            return None
        if isinstance(failure, errors.CorollaError):
            error = failure
        elif isinstance(failure, Exception):
            log.error("unexpected failure", extra={"method": self._method, "where": where(failure)})
            error = errors.InternalError("internal error")
        else:
            return None
        fault: Fault = "caller" if error.is_callers_fault else "service"
        self._metrics.done(self._method, error, seconds, fault)
        if not isinstance(error, errors.CallerStalled):  # which was counted when it came about
            self._metrics.error(error.reason)
        if self._is_audited or error.code in _DENIALS:
            call.write(error.reason, seconds)
        return error


def where(failure: BaseException) -> str:
    """Type and call path of an exception without its text, which might quote a prompt."""
    frames = traceback.extract_tb(failure.__traceback__)
    path = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(failure).__name__} at {path}"
