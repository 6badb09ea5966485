"""Opens sessions: a chain from the router, then a place on each of its hops, or nothing at all."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from corolla.chassis.errors import (
    HopUnavailable,
    ModelNotFound,
    NoChain,
    OutOfPages,
    RouterUnavailable,
    StoreUnavailable,
)
from corolla.client.chain.control import ControlPlane
from corolla.client.chain.gangs import Gang
from corolla.client.chain.placement import PlacementWatch
from corolla.client.chain.session import ChainSession, SessionIdentity
from corolla.client.chain.streams import DataPlane
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

log = logging.getLogger(__name__)

_MAX_ATTEMPTS: Final = 3
_QUARANTINE_S: Final = 5.0
_ALL_TOKENS: Final = 2**31


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Sizes and times of steps and leases."""

    prefill_chunk_tokens: int
    step_timeout_s: float
    lease_ms: int


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a session needs of its hops.

    Attributes:
        max_tokens: pages for so many are reserved.
        lease_ms: how long the hops keep it without hearing of it; None is the configured lease.
        recorded: the chain of its last turn; those hops keep what they hold of it.
        record_id: the id under which the router knows the session, if it does.
    """

    max_tokens: int
    transient: bool
    lease_ms: int | None = None
    recorded: common_pb2.Chain | None = None
    record_id: str = ""

    def resumes(self, hop: common_pb2.Hop) -> bool:
        """Whether the hop may hold something of the session that counts."""
        return self.recorded is not None and hop in self.recorded.hops


class ChainOpener:
    """Owns what sessions on chains share: the streams, the gangs and the quarantine."""

    def __init__(
        self,
        control: ControlPlane,
        placement: PlacementWatch,
        plane: DataPlane,
        edges: Edges,
        compute: ComputeThread,
        fingerprint: str,
        num_blocks: int,
        limits: ChainLimits,
    ) -> None:
        self._control = control
        self._placement = placement
        self._plane = plane
        self._edges = edges
        self._compute = compute
        self._fingerprint = fingerprint
        self._num_blocks = num_blocks
        self._limits = limits
        # A chain's gang lives as long as a session has it.
        self._gangs: WeakValueDictionary[bytes, Gang] = WeakValueDictionary()
        self._quarantine: dict[str, float] = {}

    @asynccontextmanager
    async def open(self, identity: SessionIdentity, options: OpenOptions) -> AsyncIterator[ChainSession]:
        """A session on a chain. On leaving, the caller must have closed or parked it.

        A hop that cannot be reached is left out for a while and another chain is tried; so is one without free pages.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
        """
        session = await self._open(identity, options)
        try:
            yield session
        finally:
            session.leave_gang()

    async def forget(self, identity: SessionIdentity, chain: common_pb2.Chain) -> None:
        """Frees a session that is open nowhere in this process, as after its deletion."""
        addresses = [hop.address for hop in chain.hops]
        # Where a connection fails, the session's lease will end.
        await asyncio.gather(*map(self._plane.connect, addresses), return_exceptions=True)
        for address in addresses:
            self._plane.tell(address, pb.Close(session_id=identity.session_id, epoch=identity.epoch))

    async def close(self) -> None:
        for gang in list(self._gangs.values()):
            await gang.close()

    async def _open(self, identity: SessionIdentity, options: OpenOptions) -> ChainSession:
        too_full: set[str] = set()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            chain = await self._plan(options, frozenset(too_full))
            try:
                answers = await asyncio.gather(
                    *(self._plane.open(hop.address, self._open_frame(identity, options, hop)) for hop in chain.hops),
                    return_exceptions=True,
                )
            except asyncio.CancelledError:
                self._undo(identity, options, chain)
                raise
            failures = [
                (hop, answer)
                for hop, answer in zip(chain.hops, answers, strict=True)
                if isinstance(answer, BaseException)
            ]
            if not failures:
                opened = [answer for answer in answers if not isinstance(answer, BaseException)]
                held = min(answer.num_cached_tokens for answer, _ in opened)
                max_step_tokens = min(max_tokens for _, max_tokens in opened)
                return self._session(identity, chain, held, max_step_tokens)
            self._undo(identity, options, chain)
            for hop, failure in failures:
                if isinstance(failure, HopUnavailable):
                    self._quarantine[hop.server_id] = asyncio.get_running_loop().time() + _QUARANTINE_S
                elif isinstance(failure, OutOfPages):
                    too_full.add(hop.server_id)
            hard = [failure for _, failure in failures if not isinstance(failure, HopUnavailable | OutOfPages)]
            if hard or attempt == _MAX_ATTEMPTS:
                raise (hard or [failure for _, failure in failures])[0]
            last_failure = failures[0][1]
            log.warning(
                "chain not opened; trying another", extra={"reason": getattr(last_failure, "reason", "INTERNAL")}
            )
        raise NoChain("no chain could be opened")

    async def _plan(self, options: OpenOptions, too_full: frozenset[str]) -> common_pb2.Chain:
        now_s = asyncio.get_running_loop().time()
        self._quarantine = {server: until for server, until in self._quarantine.items() if until > now_s}
        excluded = too_full | frozenset(self._quarantine)
        plan = partial(
            self._control.plan_chain,
            fingerprint=self._fingerprint,
            session_id=options.record_id,
            excluded=excluded,
        )
        try:
            try:
                planned = await plan(num_tokens=options.max_tokens)
            except OutOfPages:
                # What the router knows of pages is as old as the last heartbeat; the hops have the last word.
                planned = await plan(num_tokens=0)
        except (RouterUnavailable, StoreUnavailable):
            chain = self._placement.cheapest_chain
            if chain is None or chain.fingerprint != self._fingerprint:
                raise
            if any(hop.server_id in excluded for hop in chain.hops):
                raise
            return chain
        except ModelNotFound:
            # We do have the model; only its blocks have no server, and never had one.
            listed = f"0:{self._num_blocks}"
            raise NoChain(f"no server holds blocks {listed}", metadata={"uncovered_blocks": listed}) from None
        except NoChain:
            # Leaving servers out may have made the gap; then what is wrong with them is the better answer.
            if too_full:
                raise OutOfPages("block servers have too few free KV pages for this request") from None
            raise
        return planned.chain

    def _open_frame(self, identity: SessionIdentity, options: OpenOptions, hop: common_pb2.Hop) -> pb.Open:
        return pb.Open(
            session_id=identity.session_id,
            epoch=identity.epoch,
            tenant=identity.tenant,
            resume=options.resumes(hop),
            max_tokens=options.max_tokens,
            blocks=hop.span,
            lease_ms=options.lease_ms or self._limits.lease_ms,
            transient=options.transient,
        )

    def _session(
        self, identity: SessionIdentity, chain: common_pb2.Chain, position: int, max_step_tokens: int
    ) -> ChainSession:
        key = chain.SerializeToString(deterministic=True)
        gang = self._gangs.get(key)
        if gang is None:
            gang = Gang(list(chain.hops), self._plane, self._edges, self._compute, self._limits.step_timeout_s)
            self._gangs[key] = gang
        return ChainSession(
            identity, chain, position, self._plane, gang, self._edges, self._compute,
            prefill_chunk_tokens=min(self._limits.prefill_chunk_tokens, max_step_tokens),
            step_timeout_s=self._limits.step_timeout_s,
        )  # fmt: skip

    def _undo(self, identity: SessionIdentity, options: OpenOptions, chain: common_pb2.Chain) -> None:
        """What an open that failed in part has taken is given back; what hops held before, they keep."""
        for hop in chain.hops:
            session_id, epoch = identity.session_id, identity.epoch
            keep = pb.Truncate(session_id=session_id, epoch=epoch, position=_ALL_TOKENS, idle=True)
            drop = pb.Close(session_id=session_id, epoch=epoch)
            self._plane.tell(hop.address, keep if options.resumes(hop) else drop)
