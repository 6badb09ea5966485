"""Takes the place of a registration where a server only tries whether it would start: it joins no placement."""

import asyncio
from collections.abc import Sequence

from corolla.block_server.registration import Registration
from corolla.v1 import router_pb2
from corolla.wire.span import Span


class TrialRegistration(Registration):
    """Chooses a span as large as a router may choose one, and tells no router of the server."""

    async def register(self, span: Span | None) -> Span:
        """Returns the given span, or the one from block 0 on that the server's description has room for."""
        described = self._server
        if span is not None:
            return span
        num_blocks = min(described.capacity_blocks, described.num_model_blocks)
        if described.weight_blocks:
            # The first server has the embedding, which takes as much as the head.
            num_blocks = min(num_blocks, int(described.weight_blocks - described.head_blocks))
        return Span(0, max(1, num_blocks))

    async def run(self) -> None:
        """Sends no heartbeat."""
        await asyncio.Event().wait()

    async def ask_router(self) -> int:
        """Asks a router for the placement, and returns how many servers of the model it has.

        Raises:
            CorollaError: no router answers, or the router refuses this server.
        """
        return len(await super().placement())

    async def placement(self) -> Sequence[router_pb2.PlacedServer]:
        """Returns no servers, so that none is called."""
        return ()

    async def deregister(self, num_moved_sessions: int = 0, num_left_sessions: int = 0) -> None:
        """Has nothing to give back."""
