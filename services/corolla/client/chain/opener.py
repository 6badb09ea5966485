"""Opens sessions that decode in gangs with the others of their chain."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from corolla.client.chain.account import Recovered, RecoveryAccount
from corolla.client.chain.gangs import Gang
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.recovery import Recovery
from corolla.client.chain.replay import Places, Replayer
from corolla.client.chain.reservations import ChainLimits, OpenOptions, Reservations
from corolla.client.chain.routes import Routes
from corolla.client.chain.session import ChainSession
from corolla.client.chain.streams import DataPlane
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2


class ChainOpener:
    """Owns what sessions on chains share: the streams, the reservations and the gangs.

    Args:
        observe: is told of each recovery.
    """

    def __init__(
        self,
        routes: Routes,
        plane: DataPlane,
        edges: Edges,
        compute: ComputeThread,
        limits: ChainLimits,
        observe: Callable[[Recovered], None],
    ) -> None:
        self._reservations = Reservations(routes, plane, limits)
        replayer = Replayer(self._reservations, plane, limits)
        self._recovery = Recovery(routes, self._reservations, replayer, plane.moves, limits, observe)
        self._plane = plane
        self._edges = edges
        self._compute = compute
        self._limits = limits
        # A chain's gang lives as long as a session has it.
        self._gangs: WeakValueDictionary[bytes, Gang] = WeakValueDictionary()

    @asynccontextmanager
    async def open(
        self,
        identity: SessionIdentity,
        options: OpenOptions,
        on_recovered: Callable[[Recovered], None],
        until_s: float = math.inf,
    ) -> AsyncIterator[ChainSession]:
        """A session on a chain. On leaving, the caller must have closed or parked it.

        A hop that cannot be reached is left out for a while and another chain is tried; so is one without free pages.

        Args:
            on_recovered: is told of each recovery of this session.
            until_s: when nobody waits for its answer any more, by the event loop's clock.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
        """
        reservation = await self._reservations.reserve([identity], options)
        session = ChainSession(
            Places((identity,), reservation.chain, options, reservation.max_step_tokens),
            reservation,
            self._plane,
            self._recovery,
            RecoveryAccount(self._limits.max_recoveries, on_recovered, until_s),
            self._gang_of,
            self._edges,
            self._compute,
            max_chunk_tokens=self._limits.prefill_chunk_tokens,
            max_chunk_tokens_beside_decode=self._limits.prefill_chunk_tokens_beside_decode,
            step_timeout_s=self._limits.step_timeout_s,
        )
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

    def _gang_of(self, places: Places) -> Gang:
        key = places.chain.SerializeToString(deterministic=True)
        gang = self._gangs.get(key)
        if gang is None:
            gang = Gang(
                list(places.chain.hops), self._plane, self._edges, self._compute,
                max_step_tokens=places.max_step_tokens, step_timeout_s=self._limits.step_timeout_s,
            )  # fmt: skip
            self._gangs[key] = gang
        return gang
