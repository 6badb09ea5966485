"""The placement as last pushed by a router. It stays when the router goes."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import grpc

from corolla.chassis.status import from_rpc_error
from corolla.client.chain.control import ControlPlane
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_RETRY_INTERVAL_S: Final = 0.5


class PlacementWatch:
    """Follows the router's pushes and remembers the newest snapshot."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._placement: pb.Placement | None = None

    @property
    def cheapest_chain(self) -> common_pb2.Chain | None:
        """For new sessions while no router answers; None while blocks are uncovered."""
        if self._placement is None or not self._placement.HasField("cheapest_chain"):
            return None
        return self._placement.cheapest_chain

    @property
    def servers(self) -> Sequence[pb.PlacedServer]:
        """All registered servers, as far as is known."""
        return self._placement.servers if self._placement else ()

    @property
    def uncovered(self) -> list[Span]:
        """Blocks without a ready server, as far as is known."""
        return [Span(span.start, span.end) for span in self._placement.uncovered] if self._placement else []

    async def run(self) -> None:
        """Watches for ever."""
        told = False
        while True:
            try:
                request = pb.WatchPlacementRequest(model=self._control.model)
                async for placement in self._control.stub.WatchPlacement(request):
                    self._placement = placement
                    told = False
            except grpc.RpcError as failure:
                if not told:
                    log.warning(
                        "router lost; the last placement stands", extra={"reason": from_rpc_error(failure).reason}
                    )
                told = True
            await asyncio.sleep(_RETRY_INTERVAL_S)
