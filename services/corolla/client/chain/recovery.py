"""Carries a recovery out: other servers for lost hops, a new epoch everywhere, the missing tokens replayed."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from corolla.chassis.errors import (
    CorollaError,
    HopLeaving,
    HopSessionLost,
    HopUnavailable,
    NoChain,
    NonFiniteOutput,
    OutOfPages,
    OutputsNotKept,
    PositionGap,
)
from corolla.client.chain.account import MENDABLE, Recovered, RecoveryAccount
from corolla.client.chain.findings import Findings
from corolla.client.chain.lost import LostServers
from corolla.client.chain.moves import Moves
from corolla.client.chain.recovery_plan import CLIENT, HopState, plan_lanes
from corolla.client.chain.replay import Member, Places, Replayer
from corolla.client.chain.reservations import ChainLimits, NotOpened, Reservation, Reservations
from corolla.client.chain.routes import Routes
from corolla.planning.candidates import span_of

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 0.2


class Recovery:
    """Brings sessions back that lost hops. Shared by all sessions of a process.

    Args:
        observe: is told of each recovery that succeeded.
    """

    def __init__(
        self,
        routes: Routes,
        reservations: Reservations,
        replayer: Replayer,
        moves: Moves,
        limits: ChainLimits,
        observe: Callable[[Recovered], None] = lambda recovered: None,
    ) -> None:
        self._routes = routes
        self._reservations = reservations
        self._replayer = replayer
        self._moves = moves
        self._patience_s = limits.recovery_patience_s
        self._observe = observe

    async def recover(
        self,
        places: Places,
        members: Sequence[Member],
        failure: CorollaError,
        account: RecoveryAccount,
        stale: frozenset[int] = frozenset(),
    ) -> None:
        """Returns when every hop holds every member up to its position; `places` says where.

        Args:
            members: the sequences, in the order of the identities.
            failure: of the step that did not come back.
            account: of the request.
            stale: numbers of members of which no hop holds anything that counts.

        Raises:
            CorollaError: the failure itself where other servers would not help; else why it did not work. `places` can
                be closed all the same.
        """
        if not isinstance(failure, MENDABLE):
            raise failure
        findings = Findings(LostServers(self._patience_s), self._now_s())
        await self._mend(places, members, failure, account, findings, failure.reason.lower(), stale)

    async def _mend(
        self,
        places: Places,
        members: Sequence[Member],
        failure: CorollaError,
        account: RecoveryAccount,
        findings: Findings,
        cause: str,
        stale: frozenset[int] = frozenset(),
        *,
        in_replay: bool = False,
    ) -> None:
        """Goes on from a failure, of a step or, `in_replay`, of what was to be replayed."""
        latest: CorollaError | None = failure
        while latest is not None:
            if latest is not failure:
                # Sessions that lost the same server do not all come at once.
                await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE_S))
            account.begin(latest)
            # A server whose numbers are bad will not be replaced by one that is still to come.
            findings.patience_s = (
                0.0
                if isinstance(latest, NonFiniteOutput)
                else account.patience_s(findings.incomplete_since_s + self._patience_s - self._now_s(), self._now_s())
            )
            if isinstance(latest, HopUnavailable) and latest.reporter and not await self._moves.is_gone(latest.address):
                self._blame_wire(latest, places, members, findings, account)
            else:
                self._blame(latest, places, members, findings, account, in_replay=in_replay or latest is not failure)
            if isinstance(latest, HopLeaving) and latest.address:
                await self._moves.settled(latest.address, places.identities)
            try:
                latest = await self._attempt(places, members, findings, stale)
            except NoChain:
                if isinstance(latest, NonFiniteOutput):
                    raise latest from None  # nobody else could have tried
                raise
        recovered = findings.recovered(cause, self._now_s())
        log.warning("session recovered", extra={"cause": recovered.cause, "method": recovered.method})
        account.recovered(recovered)
        self._observe(recovered)

    async def fill(self, places: Places, member: Member, states: Sequence[HopState], account: RecoveryAccount) -> None:
        """Gives the hops what they lack of a session that was just opened; they may be others afterwards.

        Raises:
            CorollaError: as of `recover`.
        """
        findings = Findings(LostServers(self._patience_s), self._now_s())
        try:
            await self._fill(places, 0, member, states, findings)
        except CorollaError as failure:
            # What a hop had a moment ago may have made way for others since.
            findings.incomplete_since_s = self._now_s()
            await self._mend(places, [member], failure, account, findings, "idle", in_replay=True)
            return
        if findings.methods:
            recovered = findings.recovered("idle", self._now_s())
            account.recovered(recovered)
            self._observe(recovered)

    def _blame(
        self,
        failure: CorollaError,
        places: Places,
        members: Sequence[Member],
        findings: Findings,
        account: RecoveryAccount,
        *,
        in_replay: bool,
    ) -> None:
        """Learns from a failure. Raises it where other servers would not help."""
        if isinstance(failure, HopUnavailable | NonFiniteOutput):
            guilty = [hop for hop in places.chain.hops if failure.address and hop.address == failure.address]
            if isinstance(failure, NonFiniteOutput):
                account.non_finite(failure)
                if not guilty:
                    raise failure
            for hop in guilty:
                findings.lost.add(hop.server_id, self._now_s(), for_good=isinstance(failure, NonFiniteOutput))
                if isinstance(failure, HopUnavailable):
                    self._routes.avoid(hop.server_id)
                    if in_replay:
                        account.died_in_replay()
                    else:
                        account.died(span_of(hop.span), max(member.position for member in members))
        elif isinstance(failure, OutOfPages):
            findings.may_scratch = False
        elif not isinstance(failure, HopLeaving | HopSessionLost | PositionGap | OutputsNotKept):
            raise failure

    def _blame_wire(
        self,
        failure: HopUnavailable,
        places: Places,
        members: Sequence[Member],
        findings: Findings,
        account: RecoveryAccount,
    ) -> None:
        """A hop does not reach another one, though both live. The other one is replaced; if in vain, it itself."""
        is_in_vain = account.cut_off(failure.reporter, max(member.position for member in members))
        address = failure.reporter if is_in_vain else failure.address
        for hop in places.chain.hops:
            if hop.address == address:
                findings.lost.add(hop.server_id, self._now_s())
                self._routes.avoid(hop.server_id)

    async def _attempt(
        self, places: Places, members: Sequence[Member], findings: Findings, stale: frozenset[int]
    ) -> CorollaError | None:
        """Returns what stood in the way; raises what no further attempt could change."""
        places.reopened()
        self._follow(places)
        before = places.chain
        chain = await self._routes.repaired(
            before,
            findings.lost,
            num_tokens=places.options.max_tokens * len(members),
            patience_s=findings.patience_s,
            due=findings.lost.due,
        )
        fresh = [hop for hop in chain.hops if hop not in before.hops]
        try:
            reservation = await self._reservations.open(
                places.identities, replace(places.options, recorded=before), chain
            )
        except NotOpened as refused:
            self._reservations.give_back(places.identities, fresh)
            return self._refusal(refused, findings)
        findings.lost.returned(hop.server_id for hop in chain.hops)
        # A server that was only frozen frees what it holds as soon as it wakes.
        kept = {hop.server_id for hop in chain.hops}
        self._reservations.give_back(places.identities, [hop for hop in before.hops if hop.server_id not in kept])
        places.open_on(chain, reservation.max_step_tokens)
        failure = await self._fill_all(places, members, reservation, findings, stale)
        findings.incomplete_since_s = self._now_s()
        return failure

    def _follow(self, places: Places) -> None:
        """Hops that handed the sessions over make way for those that have them now, as if they always had."""
        chain = self._moves.followed(places.chain, places.opened)
        self._reservations.give_back(places.identities, [hop for hop in places.chain.hops if hop not in chain.hops])
        self._moves.forget(places.identities)
        places.chain = chain

    def _refusal(self, refused: NotOpened, findings: Findings) -> CorollaError:
        told: CorollaError | None = None
        for hop, failure in refused.failures:
            if not isinstance(failure, HopUnavailable | HopLeaving | OutOfPages):
                raise failure
            self._routes.refused(hop.server_id, failure)
            findings.lost.add(hop.server_id, self._now_s(), for_good=isinstance(failure, HopLeaving))
            told = failure
        # Who is to blame is written down; nobody died of the request's own step.
        return HopUnavailable(told.message if told else "a hop of the chain is not reachable")

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    async def _fill_all(
        self,
        places: Places,
        members: Sequence[Member],
        reservation: Reservation,
        findings: Findings,
        stale: frozenset[int],
    ) -> CorollaError | None:
        nothing = [HopState(0)] * len(reservation.opened)
        tasks = [
            asyncio.ensure_future(
                self._fill(places, number, member, nothing if number in stale else reservation.states(number), findings)
            )
            for number, member in enumerate(members)
        ]
        try:
            # Not `gather`: a failure of one that comes together with a cancellation would take its place.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            # The others were cancelled for it.
            if isinstance(failure, CorollaError):
                return failure
        if failures:
            raise failures[0]
        return None

    async def _fill(
        self, places: Places, number: int, member: Member, states: Sequence[HopState], findings: Findings
    ) -> None:
        hops = places.chain.hops
        states = [
            HopState(state.num_held, state.min_position) if hop.server_id in findings.forgetful else state
            for hop, state in zip(hops, states, strict=True)
        ]
        for lane in plan_lanes(states, member.position, may_scratch=findings.may_scratch):
            try:
                await self._replayer.run(places, number, member, lane)
            except OutputsNotKept:
                findings.forgetful.add(hops[lane.source].server_id)
                raise
            findings.methods.add("tokens" if lane.source == CLIENT else "outputs")
            findings.num_recomputed_tokens += (member.position - lane.start) * len(lane.hops)
