"""Sequences that are open together on the hops of a chain: of a client service's session one, of a batch all rows."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from corolla.chain.identity import SessionIdentity
from corolla.chain.recovery import Recovery
from corolla.chain.reservations import ChainBinding
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopLeaving
from corolla.v1 import common_pb2

Result = TypeVar("Result")


class OpenSequences:
    """What all sequences have in common, however their steps are taken: where they are open, recovery, and their end.

    Args:
        binding: which of them are open on which chain, in which epoch.
    """

    def __init__(self, binding: ChainBinding, plane: DataPlane, recovery: Recovery) -> None:
        self._binding = binding
        self._plane = plane
        self._recovery = recovery

    @property
    def chain(self) -> common_pb2.Chain:
        return self._binding.chain

    @property
    def identities(self) -> tuple[SessionIdentity, ...]:
        """As which they are open on every hop, or are about to be."""
        return self._binding.identities

    async def _with_recovery(
        self, take_step: Callable[[], Awaitable[Result]], recover: Callable[[CorollaError], Awaitable[None]]
    ) -> Result:
        """Takes a step, again after each failure that a recovery repairs; raises the others.

        Args:
            recover: brings the sequences back, or raises why not. It is also called before a step is sent, where a hop
                has handed some of them over.
        """
        while True:
            try:
                if self._plane.handovers.affect(self.chain, self._binding.open_identities):
                    raise HopLeaving("a hop of the chain handed the session over")
                return await take_step()
            except CorollaError as failure:
                await recover(failure)

    def _holders(self, number: int = 0) -> list[common_pb2.Hop]:
        """The hops that hold one of them, also where one has just handed it over."""
        return self._plane.handovers.hops_holding(self.chain, self._binding.open_identities[number])

    def close(self) -> None:
        """Frees all on every hop."""
        for number, identity in enumerate(self.identities):
            self._plane.close_session(self._holders(number), identity)
