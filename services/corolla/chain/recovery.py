"""Recovers sessions: it replaces lost hops, opens a new epoch on every hop, and replays the missing tokens."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from corolla.chain.handovers import Handovers
from corolla.chain.history import History
from corolla.chain.quarantine import LostServers
from corolla.chain.recovery_budget import (
    RECOVERABLE,
    Action,
    RecoveryBudget,
    RecoveryReport,
    classify,
    moved_blocks,
)
from corolla.chain.recovery_plan import CLIENT, HopState, plan_segments
from corolla.chain.replay import Replayer
from corolla.chain.reservations import LONGEST_BUSY_PAUSE_S, ChainBinding, ChainLimits, NotOpened, Reservations
from corolla.chain.routes import Routes
from corolla.chassis.errors import (
    AdapterNotLoaded,
    CorollaError,
    HopLeaving,
    HopSessionLost,
    HopUnavailable,
    NoChain,
    OutOfPages,
    OutputsNotKept,
    QueueFull,
    RouteUnknown,
)
from corolla.chassis.tracing import spans
from corolla.v1 import common_pb2
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 0.2


@dataclass(slots=True)
class _Job:
    """The state of one recovery over its attempts.

    Attributes:
        sequences: the sequences to fill into the hops, in the order of the binding's identities.
        stale: numbers of the sequences that hops have to get from the first token on, whatever they hold.
        lost_chain: the chain on which the sessions were when they were lost.
        incomplete_since_s: since when the sessions have not been open on every hop of a chain.
        without_outputs: ids of the servers that no longer have the boundary activations that they reported.
        may_scratch: whether replays may use scratch sessions; False once a hop had no room for one.
        patience_s: how long the next attempt waits for a server that can replace a lost one.
        longest_pause_s: the longest random pause before the next attempt.
    """

    binding: ChainBinding
    sequences: Sequence[History]
    budget: RecoveryBudget
    lost: LostServers
    began_s: float
    stale: frozenset[int] = frozenset()
    lost_chain: common_pb2.Chain = field(init=False)
    incomplete_since_s: float = field(init=False)
    without_outputs: set[str] = field(default_factory=set)
    may_scratch: bool = True
    patience_s: float = 0.0
    longest_pause_s: float = _LONGEST_PAUSE_S
    methods: set[str] = field(default_factory=set)
    num_recomputed_tokens: int = 0

    def __post_init__(self) -> None:
        self.lost_chain = self.binding.chain
        self.incomplete_since_s = self.began_s

    @property
    def position(self) -> int:
        return max(sequence.position for sequence in self.sequences)


class Recovery:
    """Recovers sessions that lost hops, and reports each success. All sessions of a process share one `Recovery`."""

    def __init__(
        self,
        routes: Routes,
        reservations: Reservations,
        replayer: Replayer,
        handovers: Handovers,
        limits: ChainLimits,
        on_recovery: Callable[[RecoveryReport], None] = lambda report: None,
    ) -> None:
        self._routes = routes
        self._reservations = reservations
        self._replayer = replayer
        self._handovers = handovers
        self._patience_s = limits.recovery_patience_s
        self._follows_numerics = limits.follows_numerics
        self._on_recovery = on_recovery

    async def recover(
        self,
        binding: ChainBinding,
        sequences: Sequence[History],
        failure: CorollaError,
        budget: RecoveryBudget,
        stale: frozenset[int] = frozenset(),
    ) -> None:
        """Recovers sessions; returns when every hop of `binding` holds every sequence up to its position.

        Args:
            sequences: the sequences to fill into the hops, in the order of the identities.
            budget: bounds the recoveries of the request.
            stale: numbers of the sequences that hops have to get from the first token on, whatever they hold.

        Raises:
            CorollaError: the failure itself if other servers would not help, otherwise the error that ended the
                recovery. The sessions can be closed in either case.
        """
        if not isinstance(failure, RECOVERABLE):
            raise failure
        job = _Job(binding, sequences, budget, LostServers(self._patience_s), _now_s(), stale)
        with spans.span("recovery") as span:
            cause = failure.reason.lower()
            span.note(lost=getattr(failure, "address", ""), cause=cause, position=job.position)
            _note(span, await self._retry(job, failure, cause), job)

    async def fill(
        self, binding: ChainBinding, sequence: History, states: Sequence[HopState], budget: RecoveryBudget
    ) -> None:
        """Gives the hops the tokens that they lack of a session that was just opened.

        `binding` may have other hops afterwards. Raises CorollaError as `recover` does.
        """
        job = _Job(binding, [sequence], budget, LostServers(self._patience_s), _now_s())
        with spans.span("recovery") as span:
            span.note(cause="idle", position=job.position)
            try:
                await self._fill(job, 0, states)
            except CorollaError as failure:
                # A hop may have evicted what it reported a moment ago.
                job.incomplete_since_s = _now_s()
                _note(span, await self._retry(job, failure, "idle", in_replay=True), job)
                return
            if job.methods:
                _note(span, self._report(job, "idle"), job)

    async def compute_anew(self, binding: ChainBinding, sequence: History, budget: RecoveryBudget) -> None:
        """Opens a session on its hops in its next epoch and replays all of its tokens.

        This is for a session whose open options have changed: the tokens that hops hold are of no use then. It counts
        as a recovery only if the first attempt fails. Raises CorollaError as `recover` does.
        """
        job = _Job(binding, [sequence], budget, LostServers(self._patience_s), _now_s())
        with spans.span("recovery") as span:
            span.note(cause="long_factors", position=job.position)
            failure = await self._attempt(job)
            if failure is not None:
                _note(span, await self._retry(job, failure, failure.reason.lower(), in_replay=True), job)

    async def grow(
        self, binding: ChainBinding, sequence: History, sizes: Sequence[int], budget: RecoveryBudget
    ) -> None:
        """Opens a session on its hops in its next epoch with room for more tokens.

        It gets the first of `sizes` for which every hop has pages, or stays as it was. Hops keep what they hold, so
        this counts as a recovery only if a hop was lost. Raises CorollaError as `recover` does.
        """
        job = _Job(binding, [sequence], budget, LostServers(self._patience_s), _now_s())
        held = binding.open_options
        failure: CorollaError | None = None
        for size in (*sizes, held.max_tokens):
            binding.raise_epoch()
            self._apply_handovers(binding)
            options = replace(held, max_tokens=size)
            try:
                opened = await self._reservations.open(
                    binding.identities, replace(options, recorded_chain=binding.chain), binding.chain
                )
            except NotOpened as refused:
                if all(isinstance(each, OutOfPages) for _, each in refused.failures):
                    continue
                failure = self._on_refusal(job, refused)
                break
            binding.open_options = options
            binding.rebind(opened)
            failure = await self._fill_all(job)
            break
        else:
            failure = HopSessionLost("a hop has no more room for a session that it held")
        if failure is not None:
            with spans.span("recovery") as span:
                span.note(cause="growth", position=job.position)
                _note(span, await self._retry(job, failure, failure.reason.lower()), job)

    async def _retry(self, job: _Job, failure: CorollaError, cause: str, *, in_replay: bool = False) -> RecoveryReport:
        """Makes attempts until one succeeds. `in_replay` says whether `failure` happened during a replay."""
        latest = failure
        while True:
            if latest is not failure:
                # A random pause spreads the attempts of sessions that lost the same server.
                await asyncio.sleep(random.uniform(0, job.longest_pause_s))
            action = await self._react(job, latest, in_replay=in_replay or latest is not failure)
            job.patience_s = self._patience(job, action)
            try:
                next_failure = await self._attempt(job)
            except NoChain:
                if action is Action.REPLACE_FOR_GOOD:
                    raise latest from None  # no other server could be tried
                raise
            if next_failure is None:
                break
            latest = next_failure
        report = self._report(job, cause)
        log.warning("session recovered", extra={"cause": cause, "method": report.method})
        return report

    def _report(self, job: _Job, cause: str) -> RecoveryReport:
        methods = "+".join(sorted(job.methods)) or "reopen"
        moved = moved_blocks(job.lost_chain, job.binding.chain)
        mixes = self._follows_numerics and job.binding.chain.mixes_numerics
        report = RecoveryReport(cause, methods, _now_s() - job.began_s, job.num_recomputed_tokens, moved, mixes)
        job.budget.on_recovery(report)
        self._on_recovery(report)
        return report

    def _patience(self, job: _Job, action: Action) -> float:
        """How long the next attempt may wait for servers.

        If a server is replaced for good, it waits only if another one is known to be away. Otherwise no other server
        can be expected for its blocks.
        """
        now_s = _now_s()
        if action is Action.REPLACE_FOR_GOOD and not (
            job.lost.may_return(now_s) or self._routes.may_gain_server(job.lost)
        ):
            return 0.0
        return job.budget.patience_s(job.incomplete_since_s + self._patience_s - now_s, now_s)

    async def _react(self, job: _Job, failure: CorollaError, *, in_replay: bool) -> Action:
        """Leaves out the server that failed, and says what was done. Raises where another attempt would not help."""
        address, reporter = getattr(failure, "address", ""), getattr(failure, "reporter", "")
        action = classify(failure, is_alive=bool(reporter) and not await self._handovers.is_disconnected(address))
        failed, died = _hops_at(job, address), list[Span]()
        if action is Action.REPLACE:
            died = [Span.of(hop.span) for hop in failed if not self._routes.is_leaving_or_gone(hop.server_id)]
            self._avoid(failed)
        blames_reporter = job.budget.spend(action, failure, job.position, died, in_replay=in_replay)
        if action is Action.REPLACE_EITHER:
            failed = _hops_at(job, reporter if blames_reporter else address)
            # If the reporter just does not know the other hop yet, other requests still use both.
            self._avoid(() if isinstance(failure, RouteUnknown) else failed)
        if action is Action.REPLACE_FOR_GOOD and not failed:
            raise failure
        if action in (Action.REPLACE, Action.REPLACE_EITHER, Action.REPLACE_FOR_GOOD):
            for hop in failed:
                job.lost.add(hop.server_id, _now_s(), for_good=action is Action.REPLACE_FOR_GOOD)
        elif action is Action.FILL_IN_PLACE:
            job.may_scratch = False
        elif action is Action.FOLLOW and address:
            await self._handovers.wait_until_settled(address, job.binding.identities)
        return action

    def _avoid(self, hops: Iterable[common_pb2.Hop]) -> None:
        for hop in hops:
            self._routes.avoid(hop.server_id)

    async def _attempt(self, job: _Job) -> CorollaError | None:
        """Makes one attempt. Returns its failure, or None; raises failures that further attempts would not change."""
        binding = job.binding
        binding.raise_epoch()
        self._apply_handovers(binding)
        before = binding.chain
        chain = await self._routes.replace_lost(
            before,
            job.lost,
            num_tokens=binding.open_options.max_tokens * len(job.sequences),
            patience_s=job.patience_s,
            retryable=job.lost.retryable,
        )
        try:
            opened = await self._reservations.open(
                binding.identities, replace(binding.open_options, recorded_chain=before), chain
            )
        except NotOpened as refused:
            fresh = [hop for hop in chain.hops if hop not in before.hops]
            self._reservations.give_back(binding.identities, fresh)
            return self._on_refusal(job, refused)
        staying = {hop.server_id for hop in chain.hops}
        job.lost.discard(staying)
        # A server that was only frozen reads the Close when it wakes, and frees the session.
        self._reservations.give_back(binding.identities, [hop for hop in before.hops if hop.server_id not in staying])
        binding.rebind(opened)
        failure = await self._fill_all(job)
        job.incomplete_since_s = _now_s()
        return failure

    def _apply_handovers(self, binding: ChainBinding) -> None:
        """Puts the hops that took sessions over into the chain, in place of those that handed them over."""
        chain = self.redirected(binding)
        self._reservations.give_back(binding.identities, [hop for hop in binding.chain.hops if hop not in chain.hops])
        self._handovers.forget(binding.identities)
        binding.chain = chain

    def redirected(self, binding: ChainBinding) -> common_pb2.Chain:
        """The chain of open sessions, with the hops that took sessions over in place of those that had them."""
        chain = self._handovers.redirect(binding.chain, binding.open_identities)
        return self._routes.continued(binding.chain, chain)

    def _on_refusal(self, job: _Job, refused: NotOpened) -> CorollaError:
        message = "a hop of the chain is not reachable"
        job.longest_pause_s = LONGEST_BUSY_PAUSE_S if refused.is_for_now else _LONGEST_PAUSE_S
        for hop, failure in refused.failures:
            if isinstance(failure, QueueFull):
                message = failure.message
                continue
            if not isinstance(failure, HopUnavailable | HopLeaving | OutOfPages | AdapterNotLoaded):
                raise failure
            self._routes.on_open_refused(hop.server_id, failure)
            job.lost.add(hop.server_id, _now_s(), for_good=isinstance(failure, HopLeaving | AdapterNotLoaded))
            message = failure.message
        # The failure has no address: the hops are excluded already, and the request's step killed no server.
        return HopUnavailable(message)

    async def _fill_all(self, job: _Job) -> CorollaError | None:
        nothing = [HopState(0)] * len(job.binding.chain.hops)
        tasks = [
            asyncio.ensure_future(
                self._fill(job, number, nothing if number in job.stale else job.binding.hop_states(number))
            )
            for number in range(len(job.sequences))
        ]
        try:
            # If a task fails while this one is cancelled, `gather` would raise the failure instead of CancelledError.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            # The other tasks were cancelled because of this failure.
            if isinstance(failure, CorollaError):
                return failure
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, asyncio.CancelledError))
        return None

    async def _fill(self, job: _Job, number: int, states: Sequence[HopState]) -> None:
        sequence, hops = job.sequences[number], job.binding.chain.hops
        states = [
            HopState(state.num_held, state.min_position) if hop.server_id in job.without_outputs else state
            for hop, state in zip(hops, states, strict=True)
        ]
        for segment in plan_segments(states, sequence.position, may_scratch=job.may_scratch):
            method = "tokens" if segment.source == CLIENT else "outputs"
            try:
                with spans.span("replay", source=method, start=segment.start, end=sequence.position):
                    await self._replayer.replay(job.binding, number, sequence, segment)
            except OutputsNotKept:
                job.without_outputs.add(hops[segment.source].server_id)
                raise
            job.methods.add(method)
            job.num_recomputed_tokens += (sequence.position - segment.start) * len(segment.hops)


def _hops_at(job: _Job, address: str) -> Sequence[common_pb2.Hop]:
    return [hop for hop in job.binding.chain.hops if address and hop.address == address]


def _note(span: spans.Span, report: RecoveryReport, job: _Job) -> None:
    """Notes in a recovery's trace span how it ended."""
    if span.is_sampled:
        hops = [f"{hop.address} {Span.of(hop.span)}" for hop in job.binding.chain.hops]
        span.note(method=report.method, recomputed_tokens=report.num_recomputed_tokens, hops=hops)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
