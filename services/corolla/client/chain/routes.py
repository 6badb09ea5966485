"""Which hops a session goes through: a whole chain from the router, or replacements for hops that were lost."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

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
from corolla.chassis.lifecycle import TaskGroup
from corolla.client.chain.control import ControlPlane
from corolla.client.chain.placement import PlacementWatch
from corolla.client.chain.quarantine import Quarantine, QuarantineCause
from corolla.planning.bookings import Bookings
from corolla.planning.candidates import candidates, chain_of
from corolla.planning.planner import Candidate, plan_around_suspects, plan_blocks
from corolla.v1 import common_pb2
from corolla.wire.span import Span

_RETRY_INTERVAL_S: Final = 0.5
# A load that a router pushes may be as old as a heartbeat.
_BOOKING_LAG_S: Final = 2.0


class Routes:
    """Plans chains, and remembers which servers failed lately.

    Replacements are planned here, on the placement as last pushed: a recovery needs no router. So are chains while no
    router or no store answers.
    """

    def __init__(
        self,
        control: ControlPlane,
        placement: PlacementWatch,
        fingerprint: str,
        num_blocks: int,
        on_quarantine: Callable[[QuarantineCause], None] = lambda cause: None,
    ) -> None:
        self._control = control
        self._placement = placement
        self._fingerprint = fingerprint
        self._num_blocks = num_blocks
        self.quarantine = Quarantine()
        self._on_quarantine = on_quarantine
        self._leaving: set[str] = set()
        self._bookings = Bookings(_BOOKING_LAG_S)
        self._tasks = TaskGroup()

    def avoid(self, server_id: str, cause: QuarantineCause = "step") -> None:
        """Leaves a server out for a while, and tells the router so that others do."""
        if self.quarantine.add(server_id, asyncio.get_running_loop().time()):
            self._on_quarantine(cause)
            self._tasks.start(self._report(server_id), "report of a server")

    def leaves(self, server_id: str) -> None:
        """Leaves a server out for good: this incarnation drains, and is to blame for nothing."""
        # Those that are gone no planner knows any more; every request would carry their names.
        self._leaving &= {each.server.server_id for each in self._placement.servers}
        self._leaving.add(server_id)

    def refused(self, server_id: str, failure: BaseException) -> None:
        """A server did not open a session: what that says of it."""
        if isinstance(failure, HopUnavailable):
            self.avoid(server_id, "open")
        elif isinstance(failure, HopLeaving):
            self.leaves(server_id)

    async def plan(
        self,
        *,
        num_tokens: int,
        record_id: str,
        blocks: Span | None,
        too_full: Collection[str] = (),
        failed: Collection[str] = (),
    ) -> common_pb2.Chain:
        """The chain of a recorded session if it still lives, else the cheapest.

        A server that failed lately is asked again where there is no chain without it: it may well be back.

        Args:
            num_tokens: for which every hop needs pages.
            record_id: the id under which the router knows the session, if it does.
            blocks: of the planned chain only these.
            too_full: servers without room for it.
            failed: servers that failed it just now.

        Raises:
            NoChain, OutOfPages, RouterUnavailable, StoreUnavailable
        """
        useless = frozenset(too_full) | frozenset(failed) | self._leaving
        excluded = useless | self._quarantined()
        try:
            chain = await self._planned_there(num_tokens, record_id, excluded)
        except (RouterUnavailable, StoreUnavailable, ModelNotFound, NoChain) as failure:
            # No router, no store, or one that has lost its memory: the last snapshot may know better.
            here = self._planned_here(num_tokens, excluded) or self._planned_here(num_tokens, useless)
            if here is None:
                raise self._no_chain(failure, are_some_full=bool(too_full)) from None
            chain = here
        chain = _cut(chain, blocks)
        self._bookings.book(chain.hops, num_tokens, asyncio.get_running_loop().time())
        return chain

    async def _planned_there(self, num_tokens: int, record_id: str, excluded: frozenset[str]) -> common_pb2.Chain:
        plan = partial(self._control.plan_chain, fingerprint=self._fingerprint, session_id=record_id, excluded=excluded)
        try:
            planned = await plan(num_tokens=num_tokens)
        except OutOfPages:
            # What the router knows of pages is as old as the last heartbeat; the hops have the last word.
            planned = await plan(num_tokens=0)
        return planned.chain

    def _planned_here(self, num_tokens: int, excluded: Collection[str]) -> common_pb2.Chain | None:
        for wanted_tokens in (num_tokens, 0):
            usable = self._candidates(wanted_tokens, excluded)
            try:
                return chain_of(plan_around_suspects(usable, self._num_blocks).hops, self._fingerprint)
            except (NoChain, OutOfPages):
                continue
        return None

    def _no_chain(self, failure: CorollaError, *, are_some_full: bool) -> CorollaError:
        """What the caller learns where the router's `failure` stands."""
        if isinstance(failure, ModelNotFound):
            # We do have the model; only its blocks have no server, and never had one.
            listed = f"0:{self._num_blocks}"
            return NoChain(f"no server holds blocks {listed}", metadata={"uncovered_blocks": listed})
        if isinstance(failure, NoChain) and are_some_full:
            # Leaving servers out may have made the gap; then what is wrong with them is the better answer.
            return OutOfPages("block servers have too few free KV pages for this request")
        return failure

    async def kept(
        self, recorded: common_pb2.Chain, useless: Collection[str], *, num_tokens: int
    ) -> common_pb2.Chain | None:
        """The chain of a session's last turn, with others in place of the hops that are of no use now.

        Those that failed lately stay if nobody can take their place. None where no hop of it would stay, or none is
        missing.

        Args:
            useless: servers that have no room for the session, or failed it just now.
        """
        gone = {hop.server_id for hop in recorded.hops if self._is_gone(hop) or hop.server_id in useless}
        may_stay = (gone & self._quarantined()).difference(useless)
        if not gone or (len(gone) == len(recorded.hops) and not may_stay):
            return None
        try:
            return await self.repaired(
                recorded, gone.union(useless), num_tokens=num_tokens, patience_s=0, due=lambda now_s: may_stay
            )
        except CorollaError:
            return None

    async def repaired(
        self,
        chain: common_pb2.Chain,
        lost: Collection[str],
        *,
        num_tokens: int,
        patience_s: float,
        due: Callable[[float], Collection[str]] = lambda now_s: (),
    ) -> common_pb2.Chain:
        """The chain with other servers in place of the lost ones, which may cut the blocks otherwise.

        Args:
            lost: server ids.
            num_tokens: for which a replacement needs pages, if that can be had.
            patience_s: how long to wait for a replacement to appear.
            due: which of the lost ones may stay, at a time, if nobody can take their place.

        Raises:
            NoChain: none appeared.
        """
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + patience_s
        while True:
            try:
                return self._repaired_now(chain, lost, num_tokens)
            except CorollaError:
                now_s = clock()
                with contextlib.suppress(CorollaError):
                    if may_stay := frozenset(due(now_s)):
                        return self._repaired_now(chain, frozenset(lost) - may_stay, num_tokens)
                if now_s >= give_up_s:
                    raise
            await self._placement.news(min(_RETRY_INTERVAL_S, give_up_s - now_s))

    async def close(self) -> None:
        await self._tasks.close()

    def _repaired_now(self, chain: common_pb2.Chain, lost: Collection[str], num_tokens: int) -> common_pb2.Chain:
        try:
            hops = self._refilled(chain, lost, num_tokens)
        except (NoChain, OutOfPages):
            # Where spans overlap, a hop that stays may be needed for more blocks, and then begins anew.
            blocks = Span(chain.hops[0].span.start, chain.hops[-1].span.end)
            hops = self._replacements(blocks, lost, num_tokens)
        fresh = [hop for hop in hops if hop not in chain.hops]
        self._bookings.book(fresh, num_tokens, asyncio.get_running_loop().time())
        return common_pb2.Chain(hops=hops, fingerprint=chain.fingerprint)

    def _refilled(self, chain: common_pb2.Chain, lost: Collection[str], num_tokens: int) -> Sequence[common_pb2.Hop]:
        """The hops that stay, as they are, and others in the gaps."""
        # A server's sessions have one run of blocks each, so a hop that stays cannot take more.
        staying = {hop.server_id for hop in chain.hops if hop.server_id not in lost}
        hops: list[common_pb2.Hop] = []
        for group in _runs(chain.hops, lost):
            if group[0].server_id in lost:
                blocks = Span(group[0].span.start, group[-1].span.end)
                hops.extend(self._replacements(blocks, staying | set(lost), num_tokens))
                staying.update(hop.server_id for hop in hops)
            else:
                hops.extend(group)
        return hops

    def _replacements(self, blocks: Span, excluded: Collection[str], num_tokens: int) -> Sequence[common_pb2.Hop]:
        """Servers with room that failed not lately, if there are; else such as may have none, or may have recovered."""
        avoided = self._avoided()
        failure: CorollaError | None = None
        attempts = ((num_tokens, True), (0, True), (0, False))
        for wanted_tokens, is_careful in attempts:
            usable = self._candidates(wanted_tokens, {*excluded, *(avoided if is_careful else ())})
            if is_careful:
                usable = [each for each in usable if not each.is_suspected]
            try:
                return chain_of(plan_blocks(usable, blocks).hops, self._fingerprint).hops
            except (NoChain, OutOfPages) as none:
                failure = none
        raise failure or NoChain(f"no server holds blocks {blocks}")

    def _candidates(self, num_tokens: int, excluded: Collection[str]) -> list[Candidate]:
        servers = self._placement.servers
        usable = candidates(
            servers, fingerprint=self._fingerprint, num_tokens=num_tokens, excluded=excluded,
            booked=self._bookings.beside(servers, asyncio.get_running_loop().time()),
        )  # fmt: skip
        # The planner keeps to the order between equals: shuffled, they share the sessions.
        random.shuffle(usable)
        return usable

    def _is_gone(self, hop: common_pb2.Hop) -> bool:
        """Whether a hop is known to be of no use: avoided, or no longer in the placement."""
        if hop.server_id in self._avoided():
            return True
        placed = {each.server_id for each in candidates(self._placement.servers, fingerprint=self._fingerprint)}
        return bool(placed) and hop.server_id not in placed

    def _quarantined(self) -> frozenset[str]:
        return self.quarantine.active(asyncio.get_running_loop().time())

    def _avoided(self) -> frozenset[str]:
        return self._quarantined() | self._leaving

    async def _report(self, server_id: str) -> None:
        # Should no router hear it, the server's lease ends, or it lives.
        with contextlib.suppress(CorollaError):
            await self._control.report_server(server_id)


def _runs(hops: Sequence[common_pb2.Hop], lost: Collection[str]) -> Iterator[list[common_pb2.Hop]]:
    """Neighbours that are all lost, or all not."""
    run: list[common_pb2.Hop] = []
    for hop in hops:
        if run and (run[-1].server_id in lost) != (hop.server_id in lost):
            yield run
            run = []
        run.append(hop)
    if run:
        yield run


def _cut(chain: common_pb2.Chain, blocks: Span | None) -> common_pb2.Chain:
    """The part of a chain that covers just `blocks`."""
    if blocks is None:
        return chain
    return common_pb2.Chain(hops=_hops_within(chain, blocks), fingerprint=chain.fingerprint)


def _hops_within(chain: common_pb2.Chain, blocks: Span) -> Iterator[common_pb2.Hop]:
    for hop in chain.hops:
        start, end = max(hop.span.start, blocks.start), min(hop.span.end, blocks.end)
        if start < end:
            part = common_pb2.Hop()
            part.CopyFrom(hop)
            part.span.start, part.span.end = start, end
            yield part
