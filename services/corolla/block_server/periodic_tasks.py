"""The periodic tasks of a block server: free sessions without a lease, set gauges, check invariants, watch devices."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Final

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine
from corolla.block_server.hop_session import SessionState
from corolla.block_server.invariants import INVARIANTS, Violation, check
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import StepWork
from corolla.cache.store import SessionCache

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
# The event loop and all steps wait while a slice of the check runs.
_SLICE_S: Final = 0.0005


@dataclass(eq=False, repr=False)
class PeriodicTasks:
    """The periodic tasks of one block server.

    Args:
        standby_lags: returns how many tokens its standby lacks of each session that has one.

    Attributes:
        violations: the violations that the last check of the invariants found.
    """

    engine: Engine
    scheduler: Scheduler[StepWork]
    sessions: SessionTable[SessionCache]
    outputs: BoundaryActivations
    peers: PeerTable
    metrics: BlockServerMetrics
    _: KW_ONLY
    standby_lags: Callable[[], Sequence[int]]
    violations: list[Violation] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        # This creates the counters. An alert notices only that a counter grows, not that it appears with a value of 1.
        for invariant in INVARIANTS:
            self.metrics.invariant_violations.labels(invariant)

    async def run(self) -> None:
        """Runs the periodic tasks once a second until the task is cancelled."""
        while True:
            self.engine.look()
            self.engine.between_iterations(self._tidy)
            self._observe()
            await asyncio.sleep(_INTERVAL_S)

    def _observe(self) -> None:
        """Sets the gauges of what is held and what waits, and the counters whose totals other objects count."""
        metrics, sessions, pool = self.metrics, self.sessions, self.sessions.pool
        metrics.sessions.set(len(sessions))
        num_running = sum(each.state is SessionState.RUNNING for each in sessions)
        metrics.standbys.observe(num_running, self.standby_lags())
        metrics.count_to(metrics.standbys.hits, sessions.num_standby_tokens)
        metrics.pages.labels("used").set(pool.num_used)
        metrics.pages.labels("reserved").set(pool.num_reserved)
        metrics.pages.labels("cached").set(pool.num_cached)
        metrics.pages.labels("free").set(pool.num_free)
        metrics.guaranteed_pages.labels("kept").set(sessions.num_kept_pages)
        metrics.guaranteed_pages.labels("missing").set(sessions.guarantees.num_missing)
        metrics.usage.set(1 - pool.num_available / pool.num_pages)
        metrics.count_to(metrics.prefix_queries, pool.num_prefix_tokens_asked)
        metrics.count_to(metrics.prefix_hits, pool.num_prefix_tokens_found)
        metrics.count_to(metrics.evicted, sessions.num_evicted)
        metrics.boundary_activation_bytes.set(self.outputs.nbytes)
        metrics.count_to(metrics.outputs_evicted, self.outputs.num_evicted)
        metrics.waiting.set(len(self.scheduler))
        metrics.ring_waiting.set(self.engine.first_hop.num_waiting)

    def check_invariants(self) -> None:
        """Frees the sessions whose lease has run out, and checks all invariants at once.

        It must be called while nothing is computed, copied or about to change.
        """
        self._note([*chain.from_iterable(self._begin())])

    def _tidy(self) -> None:
        self._check_slice(self._begin(), [])

    def _begin(self) -> Iterator[list[Violation]]:
        """Frees the sessions whose lease has run out. Returns a check of the invariants, which has yet to begin."""
        now_s = self.engine.clock()
        self.metrics.expired.inc(self.sessions.expire(now_s))
        return check(self.sessions, self.outputs, self.peers.numbers, now_s)

    def _check_slice(self, parts: Iterator[list[Violation]], found: list[Violation]) -> None:
        """Checks invariants for one slice of time, and schedules the next slice. It gives up if other work waits."""
        if self.engine.has_more_to_do:
            return
        end_s = self.engine.clock() + _SLICE_S
        for part in parts:
            found += part
            if self.engine.clock() >= end_s:
                next_slice = partial(self._check_slice, parts, found)
                asyncio.get_running_loop().call_soon(self.engine.between_iterations, next_slice)
                return
        self._note(found)

    def _note(self, found: list[Violation]) -> None:
        for violation in found:
            self.metrics.invariant_violations.labels(violation.invariant).inc()
            if violation not in self.violations:
                log.error(
                    "the server's internal tables disagree; please report this bug",
                    extra={"invariant": violation.invariant, "what": violation.text},
                )
        self.violations = found
