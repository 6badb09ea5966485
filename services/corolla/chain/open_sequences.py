"""Sequences that are open together on the hops of a chain: one for a session, or all rows of a batch."""

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
    """Base class of sequences on a chain: it knows where they are open, repeats failed steps, and closes them.

    Args:
        binding: the sequences' identities, and the chain that they are open on.
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

    def _holders(self, number: int = 0) -> list[common_pb2.Hop]:
        """The hops that may hold a sequence: the chain's, and servers that took it over from them."""
        return self._plane.handovers.hops_holding(self.chain, self._binding.open_identities[number])

    def close(self) -> None:
        """Frees all sequences on every hop."""
        for number, identity in enumerate(self.identities):
            self._plane.close_session(self._holders(number), identity)
