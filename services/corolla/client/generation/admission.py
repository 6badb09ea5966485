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
        max_waiting: requests that wait for their turn.
        max_bytes: of the messages of all requests, running and waiting.
    """

    def __init__(self, max_running: int, max_waiting: int, max_bytes: int, metrics: ClientMetrics) -> None:
        self._line: WaitingLine[asyncio.Future[None]] = WaitingLine(max_running, max_waiting, max_bytes)
        self._metrics = metrics

    @asynccontextmanager
    async def request(self, tenant: str, num_bytes: int, usage: Usage) -> AsyncIterator["RequestMeter"]:
        """Holds a place in the line, and among those who run from the request's turn on.

        Args:
            num_bytes: of its message.

        Raises:
            QueueFull: there is no room in the line.
        """
        ticket = asyncio.get_running_loop().create_future()
        for displaced in self._line.enter(tenant, ticket, num_bytes):
            if not displaced.done():
                displaced.set_exception(QueueFull("the service has more requests than it takes; others had fewer"))
        meter = RequestMeter(self._metrics, usage, ticket)
        try:
            self._admit()
            yield meter
        finally:
            if not ticket.cancel() and not ticket.cancelled():
                ticket.exception()  # seen: the request may have failed before it asked for its turn
            self._line.leave(ticket)
            self._admit()
            meter.close()

    def _admit(self) -> None:
        for ticket in self._line.admit():
            # One whose caller left in this very moment gives its place back when its own turn on the loop comes.
            if not ticket.done():
                ticket.set_result(None)


class RequestMeter:
    """One request: its turn and what the metrics learn of it."""

    def __init__(self, metrics: ClientMetrics, usage: Usage, ticket: asyncio.Future[None]) -> None:
        self._metrics = metrics
        self._usage = usage
        self._ticket = ticket
        self._newest_token_s: dict[int, float] = {}
        self._is_waiting = True
        metrics.waiting.inc()

    @property
    def started_s(self) -> float:
        """When the request began, by `time.monotonic()`."""
        return self._usage.started_s

    @property
    def must_wait(self) -> bool:
        """Whether its turn has not come yet."""
        return not self._ticket.done()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Waits for the request's turn. Raises QueueFull when others have more right to wait."""
        await self._ticket
        yield

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
