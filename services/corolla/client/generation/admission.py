"""Who asks, which requests run, which wait, and how each is counted."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from corolla.chain.recovery_budget import RecoveryReport
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import TraceParent
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.metrics import ClientMetrics
from corolla.decoding.stopping import FinishReason


@dataclass(slots=True)
class Usage:
    """Counted while the request runs; times in seconds from its start.

    `withholds_cached_tokens`: whether its caller learns nothing of them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    withholds_cached_tokens: bool = False
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    recoveries: int = 0
    stall_s: float = 0.0
    time_to_first_token_s: float = 0.0
    finish_reasons: list[FinishReason] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def count_tokens(self, num_tokens: int) -> None:
        if num_tokens and not self.completion_tokens:
            self.time_to_first_token_s = self.elapsed_s
        self.completion_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one request.

    Attributes:
        until_s: when it no longer waits, by the event loop's clock.
        trace: the span of its own that it named, if it traces.
        is_streamed: whether it takes its answer bit by bit.
        answer_seconds: the longest that its tenant's answers may take; None: any time.
    """

    tenant: str
    usage: Usage
    until_s: float = math.inf
    trace: TraceParent | None = None
    is_streamed: bool = False
    answer_seconds: float | None = None

    def waits_until_s(self, time_limit_s: float | None) -> float:
        """When nobody waits any more for an answer that begins now."""
        if time_limit_s is None:
            return self.until_s
        return min(self.until_s, asyncio.get_running_loop().time() + time_limit_s)


class AdmissionTicket:
    """A request's place: in the line until its turn has come, then among those who run."""

    def __init__(self, ticket: asyncio.Future[None]) -> None:
        self._ticket = ticket

    @property
    def is_waiting(self) -> bool:
        """Whether its turn has not come yet."""
        return not self._ticket.done()

    async def admitted(self) -> None:
        """Returns when the turn has come. Raises QueueFull when others have more right to wait."""
        if self.is_waiting:
            with spans.span("queue"):
                await self._ticket
        else:
            await self._ticket


class Admission:
    """Bounds the sequences that run, the requests that wait and the bytes of both. The line says who is next."""

    def __init__(self, line: WaitingLine[asyncio.Future[None]]) -> None:
        self._line = line

    @asynccontextmanager
    async def enter(self, tenant: str, num_bytes: int, num_sequences: int = 1) -> AsyncIterator[AdmissionTicket]:
        """A place in the line, and from its admission on among the requests that run, one for each of its sequences.

        Raises QueueFull.
        """
        ticket = asyncio.get_running_loop().create_future()
        for displaced, refusal in self._line.enter(tenant, ticket, num_bytes, num_sequences):
            if not displaced.done():
                displaced.set_exception(refusal)
        try:
            self._admit()
            yield AdmissionTicket(ticket)
        finally:
            if not ticket.cancel() and not ticket.cancelled():
                ticket.exception()  # seen: the request may have failed before it asked for its turn
            self._line.leave(ticket)
            self._admit()

    def _admit(self) -> None:
        for ticket in self._line.admit():
            # One whose caller left in this very moment gives its place back when its own turn on the loop comes.
            if not ticket.done():
                ticket.set_result(None)


class RequestMeter:
    """What usage and metrics learn of one request. Within the context it counts as waiting, then as running."""

    def __init__(self, metrics: ClientMetrics, usage: Usage) -> None:
        self._metrics = metrics
        self._usage = usage
        self._newest_token_s: dict[int, float] = {}
        self._is_waiting = True

    def __enter__(self) -> Self:
        self._metrics.waiting.inc()
        return self

    def __exit__(self, *_failure: object) -> None:
        (self._metrics.waiting if self._is_waiting else self._metrics.running).dec()

    @property
    def started_s(self) -> float:
        """When the request began, by `time.monotonic()`."""
        return self._usage.started_s

    def count_prompt(self, num_tokens: int, num_cached_tokens: int, num_recomputed_tokens: int) -> None:
        """The chain is open and the prompt known: what of it the hops still had, and what of the log they had lost."""
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
        """So many tokens of one of the answers came together."""
        now_s = time.monotonic()
        newest_s = self._newest_token_s.get(completion_index)
        for _ in range(num_tokens):
            if newest_s is not None:
                self._metrics.inter_token.observe(now_s - newest_s)
            newest_s = self._newest_token_s[completion_index] = now_s
        is_first = not self._usage.completion_tokens
        self._usage.count_tokens(num_tokens)
        if is_first and num_tokens:
            self._metrics.time_to_first_token.observe(self._usage.time_to_first_token_s)
            spans.event("first token")
        self._metrics.generation_tokens.inc(num_tokens)

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """A step carried draft tokens, of which so many were right."""
        self._usage.drafted_tokens += num_drafted
        self._usage.accepted_tokens += num_accepted
        self._metrics.drafted_tokens.inc(num_drafted)
        self._metrics.accepted_tokens.inc(num_accepted)

    def count_recovery(self, report: RecoveryReport) -> None:
        """The chain lost hops and has recovered."""
        self._usage.recoveries += 1
        self._usage.stall_s += report.seconds

    def count_finish(self, reason: FinishReason | None) -> None:
        """An answer ended, or not yet where `reason` is None."""
        if reason is None:
            return
        self._usage.finish_reasons.append(reason)
        self._metrics.success.labels(reason.value).inc()
        self._metrics.e2e.observe(self._usage.elapsed_s)
