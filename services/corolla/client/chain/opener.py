"""Opens sessions that decode in gangs with the others of their chain."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from corolla.client.chain.control import ControlPlane
from corolla.client.chain.gangs import Gang
from corolla.client.chain.placement import PlacementWatch
from corolla.client.chain.reservations import ChainLimits, OpenOptions, Reservation, Reservations
from corolla.client.chain.session import ChainSession, SessionIdentity
from corolla.client.chain.streams import DataPlane
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2


class ChainOpener:
    """Owns what sessions on chains share: the streams, the reservations and the gangs."""

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
        self._reservations = Reservations(control, placement, plane, fingerprint, num_blocks, limits)
        self._plane = plane
        self._edges = edges
        self._compute = compute
        self._limits = limits
        # A chain's gang lives as long as a session has it.
        self._gangs: WeakValueDictionary[bytes, Gang] = WeakValueDictionary()

    @asynccontextmanager
    async def open(self, identity: SessionIdentity, options: OpenOptions) -> AsyncIterator[ChainSession]:
        """A session on a chain. On leaving, the caller must have closed or parked it.

        A hop that cannot be reached is left out for a while and another chain is tried; so is one without free pages.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
        """
        reservation = await self._reservations.reserve([identity], options)
        session = self._session(identity, reservation)
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

    def _session(self, identity: SessionIdentity, reservation: Reservation) -> ChainSession:
        chain = reservation.chain
        key = chain.SerializeToString(deterministic=True)
        gang = self._gangs.get(key)
        if gang is None:
            gang = Gang(
                list(chain.hops), self._plane, self._edges, self._compute,
                max_step_tokens=reservation.max_step_tokens, step_timeout_s=self._limits.step_timeout_s,
            )  # fmt: skip
            self._gangs[key] = gang
        return ChainSession(
            identity, chain, reservation.num_cached_tokens, self._plane, gang, self._edges, self._compute,
            prefill_chunk_tokens=min(self._limits.prefill_chunk_tokens, reservation.max_step_tokens),
            step_timeout_s=self._limits.step_timeout_s,
        )  # fmt: skip
