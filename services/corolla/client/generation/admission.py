"""The caller of a request, the admission of requests, and their counts in usage and metrics."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from corolla.chain.recovery_budget import RecoveryReport
from corolla.chassis.tenant_limits import StandbyMode
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import TraceParent
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.metrics import ClientMetrics, RequestEnd
from corolla.decoding.stopping import FinishReason
from corolla.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one request.

    Attributes:
        usage: what the request has used so far, without `total_seconds`.
        started_s: when the request began, by `time.monotonic()`.
        until_s: when the caller stops waiting, by the event loop's clock.
        trace: the caller's trace span, if it sent one.
        is_streamed: whether the caller reads its answer as a stream.
        has_continuous_usage: whether each part of the stream says the usage so far.
        withholds_cached_tokens: whether the caller does not see the number of cached tokens.
        answer_seconds: the most seconds that the tenant's answers may take; None: no limit.
        standby: which answers of the tenant have standbys; None: the service decides.
        note: what is stored with the turn of a session, for those who read it again.
        name_ignored: tells the caller which places of its request have no effect.
        expect_reply: counts bytes that the reply will surely have; raises QueueFull if the service holds too many.
    """

    tenant: str
    usage: pb.Usage = field(default_factory=pb.Usage)
    started_s: float = field(default_factory=time.monotonic)
    until_s: float = math.inf
    trace: TraceParent | None = None
    is_streamed: bool = False
    has_continuous_usage: bool = False
    withholds_cached_tokens: bool = False
    answer_seconds: float | None = None
    standby: StandbyMode | None = None
    note: bytes = b""
    name_ignored: Callable[[Sequence[str]], None] = lambda places: None
    expect_reply: Callable[[int], None] = lambda num_bytes: None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def shown_usage(self) -> pb.Usage:
        """The usage so far, as the caller may see it."""
        shown = pb.Usage(total_seconds=self.elapsed_s)
        shown.MergeFrom(self.usage)
        if self.withholds_cached_tokens:
            shown.ClearField("cached_tokens")
        return shown

    def waits_until_s(self, time_limit_s: float | None) -> float:
        """When the caller stops waiting for an answer that begins now, by the event loop's clock."""
        if time_limit_s is None:
            return self.until_s
        return min(self.until_s, asyncio.get_running_loop().time() + time_limit_s)


class AdmissionTicket:
    """A request's place: in the line until its turn has come, then among the running requests."""

    def __init__(self, ticket: asyncio.Future[None]) -> None:
        self._ticket = ticket

    @property
    def is_waiting(self) -> bool:
        """The request's turn has not come yet."""
        return not self._ticket.done()

    async def admitted(self) -> None:
        """Returns when the turn has come. Raises QueueFull if other requests displace this one."""
        if self.is_waiting:
            with spans.span("queue"):
                await self._ticket
        else:
            await self._ticket


class Admission:
    """Bounds the running sequences and the waiting requests. `line` chooses the next request."""

    def __init__(self, line: WaitingLine[asyncio.Future[None]]) -> None:
        self._line = line

    @asynccontextmanager
    async def enter(self, tenant: str, num_sequences: int = 1) -> AsyncIterator[AdmissionTicket]:
        """Gives a request a place in the line, and after its admission a running place for each of its sequences.

        Raises QueueFull.
        """
        ticket = asyncio.get_running_loop().create_future()
        if (found := self._line.enter(tenant, ticket, num_sequences)) is not None:
            displaced, refusal = found
            if not displaced.done():
                displaced.set_exception(refusal)
        try:
            self._admit()
            yield AdmissionTicket(ticket)
        finally:
            if not ticket.cancel() and not ticket.cancelled():
                ticket.exception()  # marks it as retrieved: the request may fail before it awaits the ticket
            self._line.leave(ticket)
            self._admit()

    def _admit(self) -> None:
        for ticket in self._line.admit():
            # A ticket whose caller has just left returns its place when its own task runs next.
            if not ticket.done():
                ticket.set_result(None)


class RequestMeter:
    """Counts one request in its usage and in the metrics.

    Inside the context, the request counts as waiting until `count_prompt`, and then as running. Each of its answers
    ends once: by its finish reason, or at the end of the context. A reading, a request without an answer, ends there.

    Args:
        num_answers: how many answers the request has; 0: it is a reading.

    Attributes:
        finish_reasons: those of the answers that have ended.
    """

    def __init__(self, metrics: ClientMetrics, caller: Caller, num_answers: int = 1) -> None:
        self.finish_reasons: list[FinishReason] = []
        self._metrics = metrics
        self._caller = caller
        self._usage = caller.usage
        self._num_answers = num_answers
        self._newest_token_s: dict[int, float] = {}
        self._is_waiting = True

    def __enter__(self) -> Self:
        self._metrics.waiting.inc()
        return self

    def __exit__(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        (self._metrics.waiting if self._is_waiting else self._metrics.running).dec()
        end = RequestEnd.from_failure(failure)
        if not self._num_answers:
            self._metrics.readings.labels(end).inc()
            self._metrics.reading_seconds.observe(self._caller.elapsed_s)
        for _ in range(self._num_answers - len(self.finish_reasons)):
            self._count_end(end)

    def count_prompt(self, num_tokens: int, num_cached_tokens: int, num_recomputed_tokens: int) -> None:
        """Counts the prompt once its chain is open, with its cached tokens, and the tokens that hops must recompute."""
        self._usage.prompt_tokens = num_tokens
        self._usage.cached_tokens = num_cached_tokens
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.prompt_length.observe(num_tokens)
        self._metrics.cached_prompt_tokens.inc(num_cached_tokens)
        self._metrics.recomputed.inc(num_recomputed_tokens)
        if self._is_waiting:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._is_waiting = False

    def count_tokens(self, completion_index: int, num_tokens: int) -> None:
        """Counts tokens of one answer that arrived together."""
        now_s = time.monotonic()
        newest_s = self._newest_token_s.get(completion_index)
        for _ in range(num_tokens):
            if newest_s is not None:
                self._metrics.inter_token.observe(now_s - newest_s)
            newest_s = self._newest_token_s[completion_index] = now_s
        if num_tokens and not self._usage.completion_tokens:
            self._usage.time_to_first_token_seconds = self._caller.elapsed_s
            self._metrics.time_to_first_token.observe(self._usage.time_to_first_token_seconds)
            spans.event("first token")
        self._usage.completion_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Counts the draft tokens of a step, and how many of them were right."""
        self._usage.drafted_tokens += num_drafted
        self._usage.accepted_tokens += num_accepted
        self._metrics.drafted_tokens.inc(num_drafted)
        self._metrics.accepted_tokens.inc(num_accepted)

    def count_recovery(self, report: RecoveryReport) -> None:
        """Counts a recovery of the chain from lost hops."""
        self._usage.recoveries += 1
        self._usage.stall_seconds += report.seconds

    def count_doubt(self, num_tokens: int) -> None:
        """Counts that the tokens of an answer after its first `num_tokens` may differ from those of an undisturbed one.

        A hop was then replaced by a server of other numerics.
        """
        if not self._usage.HasField("may_differ_from_token"):
            self._metrics.numerics_changes.inc()
            self._usage.may_differ_from_token = num_tokens
        self._usage.may_differ_from_token = min(self._usage.may_differ_from_token, num_tokens)

    def count_finish(self, reason: FinishReason | None) -> None:
        """Counts the end of an answer; a `reason` of None means that it continues, and counts nothing."""
        if reason is None:
            return
        self.finish_reasons.append(reason)
        self._count_end(reason.value)

    def _count_end(self, reason: str) -> None:
        self._metrics.success.labels(reason).inc()
        self._metrics.e2e.observe(self._caller.elapsed_s)
