"""The block server of a process, which may come to hold other blocks."""

import asyncio
import gc
import logging
from typing import Final

from corolla.block_server.service import BlockServer
from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import StartupError
from corolla.chassis.handlers import where
from corolla.chassis.lifecycle import TaskGroup
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_RETRY_INTERVAL_S: Final = 2.0


class BlockServerProcess:
    """Starts a block server. Told to move, it leaves as one incarnation and comes back at its address as the next.

    So a move is what everybody knows already: a server that drains, and one that joins.
    """

    def __init__(self, settings: BlockServerSettings) -> None:
        self._settings = settings
        self._server: BlockServer | None = BlockServer(settings)
        self._leaving: asyncio.Task[None] | None = None
        self._tasks = TaskGroup()

    async def start(self) -> None:
        if self._server is not None:
            await self._server.start()
            if self._settings.span is None:
                self._tasks.start(self._follow_orders(self._server), "moves")

    async def stop(self) -> None:
        await self._tasks.close()
        await self._leave()

    async def _follow_orders(self, server: BlockServer) -> None:
        ports = {"port": server.port, "metrics_port": server.metrics_port}
        settings = self._settings.model_copy(update=ports)
        while True:
            span = await server.ordered_span()
            try:
                # Minutes of fetching are spent serving; an order that was withdrawn meanwhile is not obeyed.
                is_wanted = await server.fetch(span)
            except StartupError as failure:
                log.error("cannot move", extra={"blocks": str(span), "reason": failure.message})
                is_wanted = False
            if not is_wanted:
                await asyncio.sleep(_RETRY_INTERVAL_S)
                continue
            log.info("moving", extra={"blocks": str(span)})
            # The weights of both need not fit at the same time.
            del server
            await self._leave()
            gc.collect()
            server = await self._come_back(settings, span)

    async def _leave(self) -> None:
        """Ends the present incarnation; whoever stops the process in the middle of that waits for the same end."""
        if self._server is not None:
            self._leaving = asyncio.create_task(self._server.stop())
            self._server = None
        if self._leaving is not None:
            await asyncio.shield(self._leaving)

    async def _come_back(self, settings: BlockServerSettings, span: Span | None) -> BlockServer:
        """A new incarnation that serves, however long that takes."""
        while True:
            try:
                server = self._server = BlockServer(settings, span)
                await server.start()
                return server
            except Exception as failure:
                log.error("could not come back; trying again", extra={"where": where(failure)})
            await self._leave()
            span = None  # by now the router may want something else
            await asyncio.sleep(_RETRY_INTERVAL_S)
