"""Which requests run, which wait, and how each is counted."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from corolla.chassis.errors import QueueFull
from corolla.client.chain.account import Recovered
from corolla.client.generation.stopping import FinishReason
from corolla.client.generation.usage import Usage
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.metrics import ClientMetrics


class Admission:
    """Refuses what is too much before it takes anything, and keeps the gauges true on every way out.

    Args:
        max_running: requests at a time.
        max_waiting: requests that wait for their turn; what they hold is their own message and its token ids.
    """

    def __init__(self, max_running: int, max_waiting: int, metrics: ClientMetrics) -> None:
        self._line: WaitingLine[asyncio.Future[None]] = WaitingLine(max_running, max_waiting)
        self._metrics = metrics

    def check(self, tenant: str) -> None:
        """Raises QueueFull where a request would be refused, so that no work is done for it."""
        self._line.check(tenant)

    @asynccontextmanager
    async def request(self, tenant: str, usage: Usage) -> AsyncIterator["RequestMeter"]:
        """Waits for a place and holds it. Raises QueueFull, at once or when others have more right to wait."""
        ticket = asyncio.get_running_loop().create_future()
        displaced = self._line.enter(tenant, ticket)
        if displaced is not None and not displaced.done():
            displaced.set_exception(QueueFull("the service has more requests than it takes; others had fewer"))
        meter = RequestMeter(self._metrics, usage)
        try:
            self._admit()
            await ticket
            yield meter
        finally:
            self._line.leave(ticket)
            self._admit()
            meter.close()

    def _admit(self) -> None:
        for ticket in self._line.admit():
            # One whose caller left in this very moment gives its place back when its own turn on the loop comes.
            if not ticket.done():
                ticket.set_result(None)


class RequestMeter:
    """Feeds the metrics of one request."""

    def __init__(self, metrics: ClientMetrics, usage: Usage) -> None:
        self._metrics = metrics
        self._usage = usage
        self._newest_token_s: dict[int, float] = {}
        self._is_waiting = True
        metrics.waiting.inc()

    @property
    def started_s(self) -> float:
        """When the request began, by `time.monotonic()`."""
        return self._usage.started_s

    def prompt(self, num_tokens: int, num_cached_tokens: int, num_recomputed_tokens: int) -> None:
        """The chain is open and the prompt known: what of it the hops still had, and what of the log they had lost."""
        self._usage.prompt_tokens = num_tokens
        self._usage.cached_tokens = num_cached_tokens
        self._metrics.prompt_tokens.inc(num_tokens)
        self._metrics.prompt_length.observe(num_tokens)
        self._metrics.cache_queries.inc(num_tokens)
        self._metrics.cache_hits.inc(num_cached_tokens)
        self._metrics.recomputed.inc(num_recomputed_tokens)
        if self._is_waiting:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._is_waiting = False

    def token(self, completion_index: int) -> None:
        now_s = time.monotonic()
        newest_s = self._newest_token_s.get(completion_index)
        self._newest_token_s[completion_index] = now_s
        if newest_s is not None:
            self._metrics.inter_token.observe(now_s - newest_s)
        self._usage.count_token()
        if self._usage.completion_tokens == 1:
            self._metrics.time_to_first_token.observe(self._usage.time_to_first_token_s)
        self._metrics.generation_tokens.inc()

    def draft(self, num_drafted: int, num_accepted: int) -> None:
        """A step carried guesses, of which so many were right."""
        self._usage.drafted_tokens += num_drafted
        self._usage.accepted_tokens += num_accepted
        self._metrics.drafted_tokens.inc(num_drafted)
        self._metrics.accepted_tokens.inc(num_accepted)

    def recovered(self, recovered: Recovered) -> None:
        """The chain lost hops, and the answer goes on."""
        self._usage.recoveries += 1
        self._usage.stall_s += recovered.seconds

    def finished(self, reason: FinishReason) -> None:
        self._metrics.success.labels(reason.value).inc()
        self._metrics.e2e.observe(self._usage.elapsed_s)

    def close(self) -> None:
        (self._metrics.waiting if self._is_waiting else self._metrics.running).dec()
