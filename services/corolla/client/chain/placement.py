"""The placement as last pushed by a router. It stays when the router goes."""

import asyncio
import contextlib
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
_REMEMBERED_S: Final = 5.0


class PlacementWatch:
    """Follows the router's pushes and remembers the newest snapshot.

    A snapshot that lacks blocks may be that of a store that has just lost its memory: for a few seconds, in which its
    servers register again, those of the last complete one count beside it. The servers themselves have the last word.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._placement: pb.Placement | None = None
        self._complete: pb.Placement | None = None
        self._incomplete_since_s = 0.0
        self._published = asyncio.Event()

    @property
    def cheapest_chain(self) -> common_pb2.Chain | None:
        """For new sessions while no router answers; None while blocks are uncovered."""
        if self._placement is None or not self._placement.HasField("cheapest_chain"):
            return None
        return self._placement.cheapest_chain

    @property
    def servers(self) -> Sequence[pb.PlacedServer]:
        """All registered servers, as far as is known."""
        if self._placement is None:
            return ()
        is_recent = asyncio.get_running_loop().time() < self._incomplete_since_s + _REMEMBERED_S
        if self._complete is None or self._complete is self._placement or not is_recent:
            return self._placement.servers
        listed = {each.server.address for each in self._placement.servers}
        unlisted = [each for each in self._complete.servers if each.server.address not in listed]
        return [*self._placement.servers, *unlisted]

    @property
    def uncovered(self) -> list[Span]:
        """Blocks without a ready server, as far as is known."""
        return [Span(span.start, span.end) for span in self._placement.uncovered] if self._placement else []

    async def news(self, timeout_s: float) -> None:
        """Returns when something was pushed, at the latest after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._published.wait()

    async def run(self) -> None:
        """Watches for ever."""
        told = False
        while True:
            try:
                request = pb.WatchPlacementRequest(model=self._control.model)
                async for placement in self._control.stub.WatchPlacement(request):
                    self._take(placement)
                    told = False
            except grpc.RpcError as failure:
                if not told:
                    log.warning(
                        "router lost; the last placement stands", extra={"reason": from_rpc_error(failure).reason}
                    )
                told = True
            await asyncio.sleep(_RETRY_INTERVAL_S)

    def _take(self, placement: pb.Placement) -> None:
        was_complete = self._placement is self._complete
        self._placement = placement
        if placement.HasField("cheapest_chain"):
            self._complete = placement
        elif was_complete:
            self._incomplete_since_s = asyncio.get_running_loop().time()
        published, self._published = self._published, asyncio.Event()
        published.set()
