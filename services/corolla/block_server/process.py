"""Runs the block server of a process, which may later move to other blocks."""

import asyncio
import logging
from functools import partial
from typing import Final

from corolla.block_server.service import BlockServer
from corolla.block_server.settings import BlockServerSettings
from corolla.block_server.spare_weights import SpareWeights
from corolla.chassis import heap
from corolla.chassis.errors import StartupError
from corolla.chassis.handlers import call_path
from corolla.chassis.lifecycle import fail
from corolla.chassis.tasks import TaskGroup
from corolla.compute.compute_thread import let_others_compute_alone
from corolla.compute.speed import Speed
from corolla.wire.span import Span

log = logging.getLogger(__name__)

RETRY_INTERVAL_S: Final = 2.0


class BlockServerProcess:
    """Runs one incarnation of a block server after another, at one address.

    To move to other blocks, the process drains one incarnation and then starts the next one. Other servers and clients
    see a server that leaves and another one that joins.
    """

    def __init__(self, settings: BlockServerSettings) -> None:
        self._settings = settings
        # A server with blocks of its own moves nowhere.
        self._spares = SpareWeights(settings.spare_mib << 20 if settings.span is None else 0)
        self._speed: Speed | None = None
        self._server: BlockServer | None = BlockServer(settings, spares=self._spares)
        self._leaving: asyncio.Task[None] | None = None
        self._tasks = TaskGroup(lambda: fail(self._not_serving))

    @property
    def incarnation(self) -> BlockServer | None:
        """The block server that exists now; None after one has left and before the next is made."""
        return self._server

    async def start(self) -> None:
        if self._server is not None:
            let_others_compute_alone()
            heap.expect_loading()
            await self._server.start()
            if self._settings.span is None:
                self._tasks.start_essential(partial(self._follow_orders, self._server), "moves")

    async def stop(self) -> None:
        await self._tasks.close()
        await self._stop_server()

    async def _follow_orders(self, server: BlockServer) -> None:
        ports = {"port": server.port, "control_port": server.control_port, "metrics_port": server.metrics_port}
        settings = self._settings.model_copy(update=ports)
        while True:
            order = await server.order()
            span = order.span
            try:
                # The server still serves while it fetches. That may take minutes; the router may withdraw its order.
                is_wanted = await server.fetch(order)
            except Exception as failure:
                # The disk may be full, for example. The span that is served is not affected.
                reason = failure.message if isinstance(failure, StartupError) else call_path(failure)
                log.error("cannot move", extra={"blocks": str(span), "reason": reason})
                is_wanted = False
            if not is_wanted:
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            log.info("moving", extra={"blocks": str(span)})
            # The old weights are freed first, because those of both incarnations may not fit at once.
            self._speed = server.speed
            server.leaves_at_once = order.at_once
            del server
            await self._stop_server()
            heap.release()
            server = await self._start_again(settings, span)

    async def _not_serving(self) -> None:
        if self._server is not None:
            await self._server.not_serving()

    async def _stop_server(self) -> None:
        """Ends the present incarnation; a second call waits for the same end."""
        if self._server is not None:
            self._leaving = asyncio.create_task(self._server.stop())
            self._server = None
        if self._leaving is not None:
            await asyncio.shield(self._leaving)

    async def _start_again(self, settings: BlockServerSettings, span: Span | None) -> BlockServer:
        """Starts a new incarnation, and tries again until it serves."""
        while True:
            try:
                server = self._server = BlockServer(settings, span, spares=self._spares, speed=self._speed)
                heap.expect_loading()
                await server.start()
                heap.settle()
                return server
            except Exception as failure:
                log.error("could not start again with another span; trying again", extra={"where": call_path(failure)})
            await self._stop_server()
            span = None  # the router may want another span by now
            await asyncio.sleep(RETRY_INTERVAL_S)
