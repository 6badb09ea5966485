"""Chooses the hops of a session: a whole chain, or replacements for hops that were lost."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Final

from corolla.chain.beginnings import Beginnings
from corolla.chain.clock import time_s
from corolla.chain.control import ControlPlane
from corolla.chain.loop_turns import LoopTurns
from corolla.chain.placement import PlacementWatch
from corolla.chain.quarantine import Quarantine, QuarantineCause
from corolla.chassis.errors import (
    CorollaError,
    HopLeaving,
    HopUnavailable,
    ModelNotFound,
    NoChain,
    OutOfPages,
    RouterUnavailable,
    StoreUnavailable,
)
from corolla.chassis.tasks import TaskGroup
from corolla.planning.apart import Apart, plan_together
from corolla.planning.bookings import Booked, Bookings
from corolla.planning.candidates import chain_of, is_slow
from corolla.planning.fingerprints import what_differs
from corolla.planning.numerics import continued, numerics_of, with_numerics
from corolla.planning.pairing import with_partners
from corolla.planning.planner import Candidate, PlannedChain, plan_around_suspects, plan_replacements
from corolla.planning.ready_in import Promises, ready_in_seconds, waits_until
from corolla.planning.ready_servers import ReadyServers
from corolla.planning.replicas import PlannedSession
from corolla.planning.standbys import holder_for, standby_for
from corolla.v1 import blocks_pb2, common_pb2, router_pb2
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span

_RETRY_INTERVAL_S: Final = 0.5
_MOST_RETRY_S: Final = 600.0
"""The longest time until callers may come again, whatever a server says of its start."""
_MOST_TOKENS: Final = 2**31
_MOST_PLANS: Final = 4
"""After so many plans whose servers had no room for what some of them lack of a text, room does not count."""
# The greatest age of a heartbeat when a router's push brings its load to this process.
_BOOKING_LAG_S: Final = 2.0


class Routes:
    """Plans chains, and remembers which servers failed lately.

    Chains and replacements are planned here, from the placement that was pushed last, so neither a new session nor a
    recovery needs a router. A router is asked if the placement has no chain.

    Attributes:
        turns: spreads what many sessions begin at the same moment, since their server died, or a placement came for
            which they had waited.
    """

    def __init__(
        self,
        control: ControlPlane,
        placement: PlacementWatch,
        fingerprint: str,
        num_blocks: int,
        on_quarantine: Callable[[QuarantineCause], None] = lambda cause: None,
        fingerprint_parts: Mapping[str, str] | None = None,
    ) -> None:
        self._control = control
        self._placement = placement
        self._fingerprint = fingerprint
        self._num_blocks = num_blocks
        self.quarantine = Quarantine[str]()
        self._broken = Quarantine[tuple[str, str]]()
        self._on_quarantine = on_quarantine
        self._fingerprint_parts = fingerprint_parts or {}
        self._leaving: set[str] = set()
        self._promises = Promises()
        self._bookings = Bookings(_BOOKING_LAG_S)
        self.beginnings = Beginnings()
        placement.on_beginnings = self.beginnings.hear
        self._ready = ReadyServers(fingerprint)
        self._indexed_state: tuple[int, bool] | None = None
        self.turns = LoopTurns()
        self._tasks = TaskGroup()

    def avoid(self, server_id: str, cause: QuarantineCause = "step") -> None:
        """Leaves a server out for a while, and reports it to the router, so that other clients leave it out, too."""
        if self.quarantine.add(server_id, time_s()):
            self._on_quarantine(cause)
            self._tasks.start(self._report_server(server_id), "report of a server")

    def keep_apart(self, reporter_id: str, server_id: str) -> None:
        """Keeps two servers from being neighbours for a while, since the first one does not reach the other one.

        The first one says so in its heartbeats (`block_server/meetings`), so that other clients learn of it, too.
        """
        self._broken.add((reporter_id, server_id), time_s())

    def apart_from(self, server_ids: Collection[str]) -> frozenset[str]:
        """The servers that one of these does not reach."""
        return self._apart().of(server_ids)

    def observe_pace(self, chain: common_pb2.Chain, token_seconds: float) -> None:
        """Reports servers to the router when their chain is far slower than they advertise.

        The pace does not show which hop is slow, so every hop that is not yet doubted is reported.

        Args:
            token_seconds: the time from one token of a session to the next one.
        """
        indexed = self._indexed()
        if is_slow(indexed.by_id, chain, token_seconds):
            for hop in chain.hops:
                if not indexed.placed[hop.server_id].doubted:
                    self._tasks.start(self._report_server(hop.server_id, slow=True), "report of a slow server")

    def exclude_leaving(self, server_id: str) -> None:
        """Leaves a draining server out for good, without a report: it did not fail."""
        # Servers that are gone are forgotten here: otherwise every request to the router would list them.
        self._leaving &= self._placement.by_id.keys()
        self._leaving.add(server_id)

    def is_leaving(self, server_id: str) -> bool:
        """True if the server leaves, or left, in an orderly way: it refused a session, or drained before it went.

        A server that is listed no more without that died: what supervises it took it out of the placement.
        """
        return server_id in self._leaving or server_id in self._placement.drained

    def on_open_refused(self, server_id: str, failure: BaseException) -> None:
        """Leaves a server out that did not open a session, if the failure says that it is unreachable or leaves."""
        if isinstance(failure, HopUnavailable):
            self.avoid(server_id, "open")
        elif isinstance(failure, HopLeaving):
            self.exclude_leaving(server_id)

    def hear_load(self, address: str, load: blocks_pb2.HopLoad) -> None:
        """Takes the load that the server at an address has after it opened a session, or refused to."""
        if (server_id := self._indexed().ids.get(address)) is not None:
            self._bookings.hear_answer(server_id, load)

    async def plan(
        self,
        *,
        num_tokens: int,
        blocks: Span | None = None,
        excluded_ids: Collection[str] = (),
        are_some_full: bool = False,
        asks_router: bool = True,
        held: Mapping[str, int] = MappingProxyType({}),
        may_fetch: bool = False,
        new_tokens: float = math.inf,
    ) -> common_pb2.Chain:
        """Plans the cheapest chain.

        A server that failed lately is used if there is no chain without it, since it may be back.

        Args:
            num_tokens: every hop needs pages for this many tokens.
            blocks: the chain is cut to these blocks; None: all blocks.
            excluded_ids: servers that have no room for the request, or failed it just now.
            are_some_full: whether some of the excluded servers have no room.
            asks_router: whether to ask the router if the placement that was pushed last has no chain.
            held: how many of the text's first tokens servers may hold, by id.
            may_fetch: whether hops may get these tokens from servers that hold them.
            new_tokens: the most tokens of the answer.

        Raises:
            NoChain, OutOfPages, RouterUnavailable, StoreUnavailable
        """
        excluded_ids = frozenset(excluded_ids) | self._leaving
        excluded = excluded_ids | self._quarantined()
        givers = self._givers(held) if may_fetch else ()
        session = replace(self._session(num_tokens, excluded, held), givers=givers, new_tokens=new_tokens)
        if (chain := self._plan_by_snapshot(session)) is None:
            try:
                if not asks_router:
                    raise NoChain("no server holds some blocks")
                chain = await self._plan_by_router(num_tokens, excluded)
            except (RouterUnavailable, StoreUnavailable, ModelNotFound, NoChain) as failure:
                # The router or its store is gone, or the store has lost its data: the last snapshot may have a chain.
                sessions = (self._session(num_tokens, each) for each in (excluded, excluded_ids))
                chain = next(filter(None, map(self._plan_by_snapshot, sessions)), None)
                if chain is None:
                    raise self._no_chain(failure, are_some_full=are_some_full) from None
        chain = with_numerics(_cut(chain, blocks), self._indexed().placed)
        self._bookings.book(chain.hops, num_tokens, time_s())
        return chain

    def needs_text_in_common(self, num_tokens: int, held: Mapping[str, int]) -> bool:
        """The servers of a chain have room for a session only if running sessions hold the beginning of its text.

        What servers said last counts, and not which sessions are about to be opened: these may share the text.

        Args:
            num_tokens: every hop needs pages for this many tokens.
            held: how many of the text's first tokens servers may hold, by id.
        """
        if not held:
            return False

        def said(server_id: str) -> Booked:
            return replace(session.booked(server_id), num_tokens=self._bookings.num_taken_tokens(server_id))

        session = self._session(num_tokens, self._avoided(), held)
        alone, in_common = (replace(session, booked=said, held_in_common=each) for each in (False, True))
        return self._plan_with_room(alone) is None and self._plan_with_room(in_common) is not None

    @property
    def is_settling(self) -> bool:
        """Blocks lost their servers so recently that these servers may register again."""
        return self._placement.is_settling

    def may_use(self, hop: common_pb2.Hop) -> bool:
        """The hop's server is placed, and did not fail lately."""
        return not self._is_gone(hop)

    def has_replica(self, hop: common_pb2.Hop) -> bool:
        """Another ready server has the hop's blocks."""
        blocks, ready = Span.from_message(hop.span), self._indexed().by_id.values()
        return any(each.server_id != hop.server_id and each.span.covers(blocks) for each in ready)

    def tokens_in(self, seconds: float, hop: common_pb2.Hop) -> int:
        """How many tokens of a prompt the hop computes in this time; very many if its speed is not known."""
        server = self._indexed().by_id.get(hop.server_id)
        if server is None:
            return _MOST_TOKENS
        return round(seconds / (server.prompt_seconds * len(Span.from_message(hop.span))))

    def filling_seconds(self, hop: common_pb2.Hop, num_tokens: int) -> tuple[float, float]:
        """How long the hop computes so many tokens of a text, and how long it fetches them from another server."""
        server, num_blocks = self._indexed().by_id.get(hop.server_id), len(Span.from_message(hop.span))
        if server is None:
            return 0.0, math.inf
        return server.computing_seconds(num_tokens, num_blocks), server.fetching_seconds(num_tokens, num_blocks)

    def standby_for(
        self, hop: common_pb2.Hop, excluded: Collection[str], num_tokens: int, num_placed: Mapping[str, int]
    ) -> common_pb2.Hop | None:
        """The server that should stand by for a hop; see `planning.standbys`."""
        avoided = self._avoided().union(excluded)
        return standby_for(hop, self._indexed().by_id, avoided, num_tokens=num_tokens, num_placed=num_placed)

    def holder_for(
        self, hop: common_pb2.Hop, excluded: Collection[str], held: Mapping[str, int]
    ) -> common_pb2.Hop | None:
        """The server that holds most of a text as the hop would compute it; see `planning.standbys`."""
        return holder_for(hop, self._indexed().by_id, self._avoided().union(excluded), held)

    def ready_in_s(self, lost: Collection[str] = ()) -> float:
        """The seconds until each block has a server; see `planning.ready_in`."""
        servers = self._placement.servers
        late = self._promises.late(servers, time_s())
        return ready_in_seconds(servers, self._num_blocks, self._fingerprint, late.union(lost))

    async def wait_for_update(self, until_s: float) -> None:
        """Returns when another plan may succeed: after a push or half a second, and hardly later than at `until_s`."""
        await self._placement.wait_for_update(max(0.0, min(_RETRY_INTERVAL_S, until_s - time_s())))
        await self.turns.next()

    def may_gain_server(self, lost: Collection[str]) -> bool:
        """A server is joining, or one that failed lately and is not among `lost` has yet to register again."""
        placed = self._placement.servers
        if any(each.state == router_pb2.SERVER_STATE_JOINING for each in placed):
            return True
        return bool(self._quarantined().difference(lost, (each.server.server_id for each in placed)))

    async def _plan_by_router(self, num_tokens: int, excluded: frozenset[str]) -> common_pb2.Chain:
        try:
            planned = await self._control.plan_chain(self._fingerprint, num_tokens, excluded)
        except OutOfPages:
            # The router's page counts are as old as the last heartbeat, so the plan ignores them, and the hops decide.
            planned = await self._control.plan_chain(self._fingerprint, 0, excluded)
        return planned.chain

    def _plan_by_snapshot(self, session: PlannedSession) -> common_pb2.Chain | None:
        # Only the server knows whether running sessions hold the text, too, so that it takes no room.
        for num_tokens, in_common in ((session.num_tokens, False), (session.num_tokens, True), (0, False)):
            if in_common and not session.held:
                continue
            wanted = replace(session, num_tokens=num_tokens, held_in_common=in_common)
            if (chain := self._plan_with_room(wanted)) is not None:
                return chain
        return None

    def _plan_with_room(self, session: PlannedSession) -> common_pb2.Chain | None:
        """A chain whose servers have room for a session, also for what some of them lack of its text; None: not found.

        Room does not count for a session of 0 tokens.
        """
        replicas = self._indexed().replicas

        def planned_without(server_ids: frozenset[str]) -> PlannedChain:
            asked = replace(session, excluded=server_ids)
            planned = plan_around_suspects(replicas.usable(asked), self._num_blocks)
            return with_partners(planned, replicas, asked)

        with contextlib.suppress(NoChain, OutOfPages):
            for _ in range(_MOST_PLANS):
                hops = plan_together(session.apart, planned_without, session.excluded).hops
                if not (poorer := session.poorer([hop.server for hop in hops])):
                    return chain_of(hops, self._fingerprint)
                session = replace(session, excluded={*session.excluded, *poorer})
        return None

    def _no_chain(self, failure: CorollaError, *, are_some_full: bool) -> CorollaError:
        """The error for the caller if neither the router nor the snapshot had a chain."""
        if isinstance(failure, ModelNotFound):
            # This client has the model; the router does not know it because no server has registered for it yet.
            listed = f"0:{self._num_blocks}"
            return NoChain(
                f"no server holds blocks {listed} of {self._control.model}, and the router does not know this model; "
                "`corolla status` says which one it has",
                metadata={"uncovered_blocks": listed},
            )
        servers = self._placement.servers
        if servers and all(each.server.fingerprint != self._fingerprint for each in servers):
            return NoChain(what_differs(self._fingerprint_parts, servers))
        if are_some_full:
            # The gap may exist only because full servers were left out, so the caller learns that they are full.
            return OutOfPages("block servers have too few free KV pages for this request")
        if isinstance(failure, NoChain) and 0 < (ready_in_s := self.ready_in_s()) < math.inf:
            text = f"{failure.message}; servers that join say that they are ready in {math.ceil(ready_in_s)} s"
            return NoChain(text, metadata=failure.metadata, retry_after_s=min(ready_in_s, _MOST_RETRY_S))
        return failure

    def replan_recorded(
        self,
        recorded: common_pb2.Chain,
        excluded_ids: Collection[str],
        *,
        num_tokens: int,
        held: Mapping[str, int] = MappingProxyType({}),
    ) -> common_pb2.Chain | None:
        """The chain of a session's last turn, with other servers in place of the hops that are gone or excluded.

        Hops that failed lately stay if no other server can take their place. Returns None if no hop would stay, or no
        replacement is found.
        """
        apart = self._apart().among([hop.server_id for hop in recorded.hops])
        gone = {hop.server_id for hop in recorded.hops if self._is_gone(hop) or hop.server_id in excluded_ids}
        may_stay = (gone & self._quarantined()).difference(excluded_ids)
        if not gone and apart is not None:
            gone = may_stay = {apart[1]}
        if len(gone) == len(recorded.hops) and not may_stay:
            return None
        if not gone:
            self._bookings.book(recorded.hops, num_tokens, time_s())
            return self.continued(recorded, recorded)
        wanted = self._session(num_tokens, (), held)
        try:
            return self._replace_now(recorded, gone.union(excluded_ids), wanted, may_stay=may_stay)
        except CorollaError:
            return None

    async def replace_lost(
        self,
        chain: common_pb2.Chain,
        lost: Collection[str],
        *,
        num_tokens: int,
        patience_s: float,
        until_s: float = math.inf,
        retryable: Callable[[float], Collection[str]] = lambda now_s: (),
        standbys: Mapping[str, common_pb2.Hop] = MappingProxyType({}),
        held: Mapping[str, int] = MappingProxyType({}),
    ) -> common_pb2.Chain:
        """The chain with other servers in place of the lost ones. The new hops may split the blocks differently.

        Args:
            held: how many of the text's first tokens servers may hold, by id.
            standbys: the hops that take the places of lost ones if they can, by the ids of these.
            num_tokens: replacements with pages for this many tokens are preferred.
            patience_s: how long to wait for a replacement to appear; longer if servers join (`planning.ready_in`).
            until_s: when the caller stops waiting, by the event loop's clock.
            retryable: maps a time to the lost servers that may stay then if no other server can take their place.

        Raises:
            NoChain: no replacement appeared.
        """
        patient_until_s = time_s() + patience_s
        while True:
            now_s, wanted = time_s(), self._session(num_tokens, (), held)
            try:
                return self._replace_now(chain, lost, wanted, standbys, retryable(now_s))
            except CorollaError:
                ready_in_s = self.ready_in_s(lost) if patience_s else math.inf
                give_up_s = waits_until(patient_until_s, ready_in_s, now_s, until_s)
                if now_s >= give_up_s:
                    raise
            await self.wait_for_update(give_up_s)

    async def close(self) -> None:
        await self._tasks.close()

    def _replace_now(
        self,
        chain: common_pb2.Chain,
        lost: Collection[str],
        wanted: PlannedSession,
        standbys: Mapping[str, common_pb2.Hop] = MappingProxyType({}),
        may_stay: Collection[str] = (),
    ) -> common_pb2.Chain:
        """The chain with other servers in place of the lost ones; if there are none, some of the lost ones may stay."""
        working = [hop for hop in chain.hops if hop.server_id not in lost]
        usable = {server_id: hop for server_id, hop in standbys.items() if self.may_use(hop)}
        whole = self._numerics_of(chain, chain.hops)

        def without(lost: Collection[str]) -> Sequence[common_pb2.Hop]:
            try:
                hops = self._fill_gaps(chain, lost, wanted, usable)
            except (NoChain, OutOfPages):
                # If spans overlap, a server that stays may have to take more blocks; it then gets all tokens again.
                hops = self._replacements(whole, lost, wanted)
            if self._has_pair(hops, working):
                with contextlib.suppress(NoChain, OutOfPages):
                    others = self._replacements(whole, lost, wanted)
                    return hops if self._has_pair(others, working) else others
            return hops

        try:
            hops = without(lost)
        except (NoChain, OutOfPages):
            if not may_stay:
                raise
            hops = without(frozenset(lost).difference(may_stay))
        fresh = [hop for hop in hops if hop not in chain.hops]
        self._bookings.book(fresh, wanted.num_tokens, time_s())
        return self.continued(chain, common_pb2.Chain(hops=hops, fingerprint=chain.fingerprint))

    def continued(self, before: common_pb2.Chain, after: common_pb2.Chain) -> common_pb2.Chain:
        """The chain `after`, to which sessions go from the chain `before`, with the numerics of its hops."""
        return continued(before, after, self._indexed().placed)

    def _fill_gaps(
        self,
        chain: common_pb2.Chain,
        lost: Collection[str],
        wanted: PlannedSession,
        standbys: Mapping[str, common_pb2.Hop],
    ) -> Sequence[common_pb2.Hop]:
        """The chain's remaining hops, unchanged, with their standbys or other servers in the gaps."""
        filled = [standbys.get(hop.server_id, hop) if hop.server_id in lost else hop for hop in chain.hops]
        # A server holds one run of blocks of a session, so a server that stays cannot fill a gap, too.
        staying = {hop.server_id for hop in filled if hop.server_id not in lost}
        hops: list[common_pb2.Hop] = []
        for is_lost, run in groupby(filled, lambda hop: hop.server_id in lost):
            neighbours = list(run)
            if is_lost:
                gap = self._numerics_of(chain, neighbours)
                hops.extend(self._replacements(gap, staying | set(lost), wanted, self.apart_from(staying)))
                staying.update(hop.server_id for hop in hops)
            else:
                hops.extend(neighbours)
        return hops

    def _numerics_of(self, chain: common_pb2.Chain, hops: Iterable[common_pb2.Hop]) -> Sequence[tuple[Span, Numerics]]:
        """The blocks and the numerics of some hops of a chain."""
        named = with_numerics(chain, self._indexed().placed)
        return [(Span.from_message(hop.span), numerics_of(named, hop)) for hop in hops]

    def _replacements(
        self,
        gap: Sequence[tuple[Span, Numerics]],
        excluded: Collection[str],
        wanted: PlannedSession,
        apart: Collection[str] = (),
    ) -> Sequence[common_pb2.Hop]:
        """Hops for a gap: servers with room that have not failed lately; failing that, any that are not excluded.

        Args:
            gap: the blocks and the numerics of each lost hop. Of the servers that may be used, those of the same
                numerics come first.
            apart: servers that do not reach all hops that stay; they are like those that failed lately.
        """
        avoided = self._avoided().union(excluded, apart)
        for num_tokens in (wanted.num_tokens, 0):
            with contextlib.suppress(NoChain, OutOfPages):
                return self._plan(replace(wanted, num_tokens=num_tokens, excluded=avoided), gap, suspects=False)
        return self._plan(replace(wanted, num_tokens=0, excluded=excluded), gap)

    def _plan(
        self, session: PlannedSession, gap: Sequence[tuple[Span, Numerics]], *, suspects: bool = True
    ) -> Sequence[common_pb2.Hop]:
        replicas = self._indexed().replicas
        # Neighbouring hops of one server's blocks need as many servers of one kind.
        blocks = Span(gap[0][0].start, gap[-1][0].end)

        def planned_without(server_ids: frozenset[str]) -> PlannedChain:
            asked = replace(session, excluded=server_ids)
            usable = replicas.usable(asked, len(gap) + 1, blocks)
            planned = plan_replacements([each for each in usable if suspects or not each.is_suspected], gap)
            return with_partners(planned, replicas, asked, keeps_numerics=True)

        return chain_of(plan_together(session.apart, planned_without, session.excluded).hops, self._fingerprint).hops

    def _session(
        self,
        num_tokens: int,
        excluded: Collection[str],
        held: Mapping[str, int] = MappingProxyType({}),
    ) -> PlannedSession:
        booked = partial(self._bookings.booked, now_s=time_s())
        return PlannedSession(num_tokens, excluded, booked, held, held_in_common=False, apart=self._apart())

    def _givers(self, held: Iterable[str]) -> Sequence[Candidate]:
        """The servers that may give others what they hold of a text; full ones are among them."""
        ready, avoided = self._indexed().by_id, self._avoided()
        return [ready[server_id] for server_id in held if server_id in ready and server_id not in avoided]

    def _indexed(self) -> ReadyServers:
        """The servers of the placement that was pushed last."""
        state = self._placement.num_updates, self._placement.is_settling
        if self._indexed_state != state:
            self._indexed_state, placed = state, self._placement.by_id
            self._bookings.hear(placed, time_s())
            self._ready.take(placed, self._placement.turn)
        return self._ready

    def _is_gone(self, hop: common_pb2.Hop) -> bool:
        """A hop cannot be used: it is avoided, or no longer in the placement."""
        if hop.server_id in self._avoided():
            return True
        ready = self._indexed().by_id
        return bool(ready) and hop.server_id not in ready

    def _apart(self) -> Apart:
        """Returns the pairs that servers name as apart, and those whose link was found broken here lately."""
        lately = self._broken.active(time_s())
        known = self._indexed().apart
        return Apart(lately, known) if lately else known

    def _has_pair(self, hops: Sequence[common_pb2.Hop], working: Collection[common_pb2.Hop]) -> bool:
        """Some neighbours of these hops do not reach each other, and one of them is not one of those that work."""
        staying = [hop.server_id for hop in hops if hop in working]
        return self._apart().among([hop.server_id for hop in hops], staying) is not None

    def _quarantined(self) -> frozenset[str]:
        return self.quarantine.active(time_s())

    def _avoided(self) -> frozenset[str]:
        return self._quarantined() | self._leaving

    async def _report_server(self, server_id: str, *, slow: bool = False) -> None:
        # A lost report does no harm: a dead server's lease ends by itself.
        with contextlib.suppress(CorollaError):
            await self._control.report_server(server_id, slow=slow)


def _cut(chain: common_pb2.Chain, blocks: Span | None) -> common_pb2.Chain:
    """The part of a chain that covers just `blocks`."""
    if blocks is None:
        return chain
    part = common_pb2.Chain(fingerprint=chain.fingerprint, numerics=chain.numerics)
    for hop in chain.hops:
        start, end = max(hop.span.start, blocks.start), min(hop.span.end, blocks.end)
        if start < end:
            part.hops.append(hop)
            part.hops[-1].span.start, part.hops[-1].span.end = start, end
    return part
