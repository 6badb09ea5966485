"""Recovers sequences: it replaces lost hops, opens a new epoch on every hop, and replays the missing tokens."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, TypeVar

from corolla.chain.clock import time_s
from corolla.chain.handovers import Handovers
from corolla.chain.history import History
from corolla.chain.identity import SessionIdentity
from corolla.chain.quarantine import LostServers
from corolla.chain.recovery_budget import RECOVERABLE, Action, RecoveryBudget, RecoveryReport, classify
from corolla.chain.recovery_plan import CLIENT, ReplaySegment, plan_segments
from corolla.chain.replay import Replayer
from corolla.chain.reservations import (
    LONGEST_BUSY_PAUSE_S,
    ChainBinding,
    ChainLimits,
    NotOpened,
    Reservations,
    named_hops,
)
from corolla.chain.routes import Routes
from corolla.chain.standbys import Standbys
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import (
    AdapterNotLoaded,
    CorollaError,
    HopLate,
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
from corolla.planning.numerics import moved_blocks
from corolla.v1 import common_pb2
from corolla.wire.page_hashes import TextDigests
from corolla.wire.span import Span

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_LONGEST_PAUSE_S: Final = 0.2


@dataclass(slots=True)
class _Job:
    """The state of one recovery over its attempts.

    Attributes:
        sequences: the sequences to fill into the hops, in the order of the binding's identities.
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

    def segments(self, number: int) -> list[ReplaySegment]:
        """The replays that give the hops what they lack of one of the sequences."""
        states = [on_hop[number] for on_hop in self.binding.open_replies]
        for hop, state in zip(self.binding.chain.hops, states, strict=True):
            if hop.server_id in self.without_outputs:
                state.kept_start = state.kept_end = 0
        return plan_segments(states, self.sequences[number].position, may_scratch=self.may_scratch)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovers sessions that lost hops, and reports each success. All sessions of a process share one `Recovery`."""

    routes: Routes
    reservations: Reservations
    replayer: Replayer
    handovers: Handovers
    limits: ChainLimits
    on_recovery: Callable[[RecoveryReport], None] = lambda report: None

    async def recover(
        self,
        binding: ChainBinding,
        sequences: Sequence[History],
        failure: CorollaError,
        budget: RecoveryBudget,
    ) -> None:
        """Recovers sessions; returns when every hop of `binding` holds every sequence up to its position.

        Args:
            sequences: the sequences to fill into the hops, in the order of the identities.
            budget: bounds the recoveries of the request.

        Raises:
            CorollaError: the failure itself if other servers would not help, otherwise the error that ended the
                recovery. The sessions can be closed in either case.
        """
        if not isinstance(failure, RECOVERABLE):
            raise failure
        job = self._job(binding, sequences, budget)
        lost, cause = getattr(failure, "address", ""), failure.reason.lower()
        with spans.span("recovery", lost=lost, cause=cause, position=job.position) as span:
            await self._retry(span, job, failure)

    async def fill(self, binding: ChainBinding, sequence: History, budget: RecoveryBudget) -> None:
        """Gives the hops the tokens that they lack of a session that was just opened.

        `binding` may have other hops afterwards. Raises CorollaError as `recover` does.
        """
        job = self._job(binding, [sequence], budget)
        with spans.span("recovery", cause="idle", position=job.position) as span:
            if (failure := await self._fill_all(job)) is not None:
                # A hop may have evicted what it reported a moment ago.
                job.incomplete_since_s = time_s()
                await self._retry(span, job, failure, "idle", in_replay=True)
            elif job.methods:
                self._report(span, job, "idle")

    async def compute_anew(self, binding: ChainBinding, sequence: History, budget: RecoveryBudget) -> None:
        """Opens a session on its hops in its next epoch and replays all of its tokens.

        This is for a session whose open options have changed: the tokens that hops hold are of no use then. It counts
        as a recovery only if the first attempt fails. Raises CorollaError as `recover` does.
        """
        job = self._job(binding, [sequence], budget)
        with spans.span("recovery", cause="long_factors", position=job.position) as span:
            if (failure := await self._attempt(job)) is not None:
                await self._retry(span, job, failure, in_replay=True)

    async def grow(
        self, binding: ChainBinding, sequence: History, sizes: Sequence[int], budget: RecoveryBudget
    ) -> None:
        """Opens a session on its hops in its next epoch with room for more tokens.

        It gets the first of `sizes` for which every hop has pages, or stays as it was. Hops keep what they hold, so
        this counts as a recovery only if a hop was lost. Raises CorollaError as `recover` does.
        """
        job = self._job(binding, [sequence], budget)
        held = binding.open_options
        failure: CorollaError | None = HopSessionLost("a hop has no more room for a session that it held")
        for size in (*sizes, held.max_tokens):
            binding.open_options = replace(held, max_tokens=size)
            try:
                await self._open_again(job)
            except NotOpened as refused:
                binding.open_options = held
                if refused.are_full:
                    continue
                failure = self._on_refusal(job, refused)
            else:
                failure = await self._fill_all(job)
            break
        if failure is not None:
            with spans.span("recovery", cause="growth", position=job.position) as span:
                await self._retry(span, job, failure)

    def _job(
        self,
        binding: ChainBinding,
        sequences: Sequence[History],
        budget: RecoveryBudget,
    ) -> _Job:
        return _Job(binding, sequences, budget, LostServers(self.limits.recovery_patience_s), time_s())

    async def _retry(
        self, span: spans.Span, job: _Job, failure: CorollaError, cause: str = "", *, in_replay: bool = False
    ) -> None:
        """Makes attempts until one succeeds, which it reports.

        Args:
            cause: one of CAUSES; empty: the failure itself.
            in_replay: whether `failure` happened during a replay.
        """
        latest = failure
        while True:
            # What is known of the server now counts, and not what becomes of it while the session waits for its turn.
            action = await self._react(job, latest, in_replay=in_replay or latest is not failure)
            if latest is not failure:
                # A random pause spreads the attempts of sessions that lost the same server.
                await asyncio.sleep(random.uniform(0, job.longest_pause_s))
            await self.routes.turns.next()
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
        report = self._report(span, job, cause or failure.reason.lower())
        log.warning("session recovered", extra={"cause": report.cause, "method": report.method})

    def _report(self, span: spans.Span, job: _Job, cause: str) -> RecoveryReport:
        """Tells of a recovery that succeeded, also in its trace span."""
        methods = "+".join(sorted(job.methods)) or "reopen"
        moved = moved_blocks(job.lost_chain, job.binding.chain)
        mixes = self.limits.follows_numerics and job.binding.chain.mixes_numerics
        report = RecoveryReport(cause, methods, time_s() - job.began_s, job.num_recomputed_tokens, moved, mixes)
        job.budget.on_recovery(report)
        self.on_recovery(report)
        if span.is_sampled:
            hops = named_hops(job.binding.chain)
            span.note(method=methods, recomputed_tokens=report.num_recomputed_tokens, hops=hops)
        return report

    def _patience(self, job: _Job, action: Action) -> float:
        """How long the next attempt may wait for servers.

        If a server is replaced for good, it waits only if another one is known to be away. Otherwise no other server
        can be expected for its blocks.
        """
        now_s = time_s()
        if action is Action.REPLACE_FOR_GOOD and not (
            job.lost.may_return(now_s) or self.routes.may_gain_server(job.lost)
        ):
            return 0.0
        return job.budget.patience_s(job.incomplete_since_s + self.limits.recovery_patience_s - now_s, now_s)

    async def _react(self, job: _Job, failure: CorollaError, *, in_replay: bool) -> Action:
        """Leaves out the server that failed, and says what was done. Raises where another attempt would not help."""
        address, reporter = getattr(failure, "address", ""), getattr(failure, "reporter", "")
        action = classify(failure, is_alive=bool(reporter) and not await self.handovers.is_disconnected(address))
        failed, died = _hops_at(job, address), list[Span]()
        if action is Action.REPLACE:
            died = [Span.from_message(hop.span) for hop in failed if not self.routes.is_leaving(hop.server_id)]
            self._avoid(failed)
        blames_reporter = job.budget.spend(action, failure, job.position, died, in_replay=in_replay)
        if action is Action.REPLACE_EITHER:
            # Other requests keep both, but not as neighbours, unless the reporter just does not know the other hop yet.
            if not isinstance(failure, RouteUnknown):
                self._keep_apart(_hops_at(job, reporter), failed)
            failed = _hops_at(job, reporter if blames_reporter else address)
        if isinstance(failure, HopLate) and failure.is_repeated:
            self._avoid(failed)
        if action is Action.REPLACE_FOR_GOOD and not failed:
            raise failure
        if action in (Action.REPLACE, Action.REPLACE_HERE, Action.REPLACE_EITHER, Action.REPLACE_FOR_GOOD):
            for hop in failed:
                job.lost.add(hop.server_id, time_s(), for_good=action is Action.REPLACE_FOR_GOOD)
        elif action is Action.FILL_IN_PLACE:
            job.may_scratch = False
        elif action is Action.FOLLOW and address:
            await self.handovers.wait_until_settled(address, job.binding.identities)
        return action

    def _avoid(self, hops: Iterable[common_pb2.Hop]) -> None:
        for hop in hops:
            self.routes.avoid(hop.server_id)

    def _keep_apart(self, reporters: Sequence[common_pb2.Hop], hops: Sequence[common_pb2.Hop]) -> None:
        for reporter, hop in product(reporters, hops):
            self.routes.keep_apart(reporter.server_id, hop.server_id)

    async def _attempt(self, job: _Job) -> CorollaError | None:
        """Makes one attempt. Returns its failure, or None; raises failures that further attempts would not change."""
        try:
            await self._open_again(job)
        except NotOpened as refused:
            return self._on_refusal(job, refused)
        failure = await self._fill_all(job)
        job.incomplete_since_s = time_s()
        return failure

    async def _open_again(self, job: _Job) -> None:
        """Opens the sessions in their next epoch, with other servers in place of the lost ones. Raises NotOpened."""
        binding = job.binding
        binding.raise_epoch([sequence.position for sequence in job.sequences])
        self._apply_handovers(binding)
        before = binding.chain
        holding = common_pb2.Chain(hops=[*before.hops, *binding.standbys.hops])
        options = replace(binding.open_options, recorded_chain=holding)
        if options.texts is not None:
            # Servers may hold more of the text now than when the sessions were opened first.
            texts = [
                text.followed_by(sequence.inputs(0, sequence.position).token_ids)
                for text, sequence in zip(options.texts, job.sequences, strict=True)
            ]
            options = replace(options, texts=texts)
        chain = await self.routes.replace_lost(
            before,
            job.lost,
            num_tokens=options.max_tokens * len(job.sequences),
            patience_s=job.patience_s,
            until_s=job.budget.until_s,
            retryable=job.lost.retryable,
            standbys=binding.standbys.replacements(job.lost),
            # Hops of mixed numerics share no pages.
            held=self.reservations.held(options) if job.lost and not before.mixes_numerics else {},
        )
        for hop, num_trusted in binding.standbys.trusted_on(chain):
            self.reservations.truncate(binding.identities, [hop], num_trusted)
        try:
            opened = await self.reservations.open(binding.identities, options, chain)
        except NotOpened:
            fresh = [hop for hop in chain.hops if hop not in holding.hops]
            self.reservations.give_back(binding.identities, fresh)
            raise
        staying = {hop.server_id for hop in chain.hops}
        job.lost.discard(staying)
        # A server that was only frozen reads the Close when it wakes, and frees the session.
        self.reservations.give_back(binding.identities, [hop for hop in before.hops if hop.server_id not in staying])
        binding.rebind(opened)
        # The new chain may not need all standbys.
        self.reservations.give_back(binding.identities, list(binding.standbys.settle(binding.chain)))

    def _apply_handovers(self, binding: ChainBinding) -> None:
        """Puts the hops that took sessions over into the chain, in place of those that handed them over."""
        if self.handovers.affect(binding.chain, binding.open_identities):
            chain = self.redirected(binding)
            left = [hop for hop in binding.chain.hops if hop not in chain.hops]
            self.reservations.give_back(binding.identities, left)
            binding.chain = chain
        self.handovers.forget(binding.identities)

    def redirected(self, binding: ChainBinding) -> common_pb2.Chain:
        """The chain of open sessions, with the hops that took sessions over in place of those that had them."""
        chain = self.handovers.redirect(binding.chain, binding.open_identities)
        return self.routes.continued(binding.chain, chain)

    def _on_refusal(self, job: _Job, refused: NotOpened) -> CorollaError:
        message = "a hop of the chain is not reachable"
        # Sessions that recover, too, take pages only for a while that they share afterwards.
        is_for_now = refused.is_for_now or refused.are_full
        job.longest_pause_s = LONGEST_BUSY_PAUSE_S if is_for_now else _LONGEST_PAUSE_S
        for hop, failure in refused.failures:
            if isinstance(failure, QueueFull):
                message = failure.message
                continue
            if not isinstance(failure, HopUnavailable | HopLeaving | OutOfPages | AdapterNotLoaded):
                raise failure
            self.routes.on_open_refused(hop.server_id, failure)
            job.lost.add(hop.server_id, time_s(), for_good=isinstance(failure, HopLeaving | AdapterNotLoaded))
            message = failure.message
        # The failure has no address: the hops are excluded already, and the request's step killed no server.
        return HopUnavailable(message)

    async def _fill_all(self, job: _Job) -> CorollaError | None:
        try:
            while lower := job.binding.before_common_end(self._write_starts(job)):
                await self.reservations.own(job.binding, lower)
        except NotOpened as refused:
            return self._on_refusal(job, refused)
        numbers = range(len(job.sequences))
        tasks = [asyncio.ensure_future(self._fill(job, number)) for number in numbers]
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

    def _write_starts(self, job: _Job) -> list[int]:
        """The lowest position that the recovery, or what follows it, writes on each hop."""
        starts = [min(sequence.position for sequence in job.sequences)] * len(job.binding.chain.hops)
        for number in range(len(job.sequences)):
            for segment in job.segments(number):
                for hop in set(segment.hops) - segment.scratch:
                    starts[hop] = min(starts[hop], segment.start)
        return starts

    async def _fill(self, job: _Job, number: int) -> None:
        sequence, hops = job.sequences[number], job.binding.chain.hops
        for segment in job.segments(number):
            method = "tokens" if segment.source == CLIENT else "outputs"
            try:
                with spans.span("replay", source=method, start=segment.start, end=segment.end):
                    num_replayed = await self.replayer.replay(job.binding, number, sequence, segment)
            except OutputsNotKept:
                job.without_outputs.add(hops[segment.source].server_id)
                raise
            job.methods.add(method)
            job.num_recomputed_tokens += num_replayed * len(segment.hops)


def _hops_at(job: _Job, address: str) -> Sequence[common_pb2.Hop]:
    return [hop for hop in job.binding.chain.hops if address and hop.address == address]


class OpenSequences:
    """Base class of sequences on a chain: it knows where they are open, repeats failed steps, and closes them.

    Args:
        binding: the sequences' identities, and the chain that they are open on.
        standbys: names standbys for the hops of the chain.
    """

    def __init__(self, binding: ChainBinding, plane: DataPlane, recovery: Recovery, standbys: Standbys) -> None:
        self._binding = binding
        self._plane = plane
        self._recovery = recovery
        self._standbys = standbys

    @property
    def chain(self) -> common_pb2.Chain:
        return self._binding.chain

    @property
    def identities(self) -> tuple[SessionIdentity, ...]:
        """The identities under which every hop has the sequences open, or will have once the pending open succeeds."""
        return self._binding.identities

    async def _with_recovery(
        self, take_step: Callable[[], Awaitable[Result]], recover: Callable[[CorollaError], Awaitable[None]]
    ) -> Result:
        """Takes a step, and takes it again after each failure that a recovery repairs; raises the other failures.

        Args:
            recover: brings the sequences back after a failure, or raises. It is also called before a step if a hop has
                handed some of the sequences over.
        """
        while True:
            try:
                if self._plane.handovers.affect(self.chain, self._binding.open_identities):
                    raise HopLeaving("a hop of the chain handed the session over")
                return await take_step()
            except CorollaError as failure:
                await recover(failure)

    def _look_after(self, num_tokens: int, texts: Callable[[], Sequence[TextDigests]]) -> None:
        """Names standbys for the hops where that is due, and renews capabilities.

        Args:
            num_tokens: how many tokens the sequences have together, or are about to have.
            texts: gives their known texts; none if these have no names.
        """
        binding = self._binding
        if num_tokens >= binding.standbys.due_at:
            self._standbys.cover(binding, texts(), num_tokens)
        self._renew()

    def _renew(self) -> None:
        """Sends the hops fresh capabilities where that is due. Each chunk asks: a long prompt may take hours."""
        binding = self._binding
        if binding.must_renew(time_s()):
            options = binding.open_options
            for identity in binding.identities:
                self._plane.renew(
                    binding.chain.hops, identity, options.max_tokens, options.lease_ms or self._recovery.limits.lease_ms
                )

    def _holders(self, number: int = 0) -> list[common_pb2.Hop]:
        """The hops that may hold a sequence: the chain's, and servers that took it over from them."""
        return self._plane.handovers.hops_holding(self.chain, self._binding.open_identities[number])

    def close(self) -> None:
        """Frees all sequences on every hop, and on their standbys."""
        for number, identity in enumerate(self.identities):
            self._plane.close_session(self._holders(number), identity)
        self._end_standbys()

    def _end_standbys(self, kept: Sequence[common_pb2.Hop] = ()) -> None:
        """Frees the sequences on their standbys, but for those that have become hops of them."""
        self._binding.standbys.are_over = True
        self._standbys.drop(self._binding, kept)
