"""Brings evicted pages of a text back from the memory of the machine, before its session is opened."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from corolla.block_server.engine import Engine
from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.sessions import SessionTable
from corolla.cache.prefixes import PrefixName
from corolla.cache.store import KVStore, ReturningPages, SessionCache
from corolla.chassis.handlers import call_path
from corolla.chassis.tasks import TaskGroup

log = logging.getLogger(__name__)

_PART_BYTES: Final = 4 << 20
"""The bytes of one copy. Where a processor makes it, steps wait meanwhile."""
_PART_BYTES_OF_GPUS: Final = 64 << 20


@dataclass(eq=False, repr=False)
class PageReturns:
    """The pages of texts that come back before sessions are opened. They become pages of the prefix cache again."""

    sessions: SessionTable[SessionCache]
    store: KVStore
    engine: Engine
    tasks: TaskGroup
    # If two sessions with one text open together, the second finds what came back for the first.
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def names(self, request: OpenRequest) -> Sequence[PrefixName]:
        """Returns the names of the evicted pages that hold the beginning of the session's text."""
        held = self.sessions.get(request.session_id)
        if request.text is None or self.store.pool.host is None or (held is not None and request.resume):
            return ()
        return self.store.new_cache().pages_to_return(request.text, request.max_tokens)

    async def bring_back(self, request: OpenRequest) -> None:
        """Returns once the pages are there that can come back."""
        async with self._turn:
            names = self.names(request)
            part_bytes = _PART_BYTES_OF_GPUS if self.store.has_copy_stream else _PART_BYTES
            num_pages = max(1, part_bytes // max(1, self.store.page_bytes))
            parts = [names[start : start + num_pages] for start in range(0, len(names), num_pages)]
            # Each part comes to its end, even if the open that waits for it is cancelled.
            await asyncio.shield(
                asyncio.gather(*(self.tasks.start(self._return(part), "return of pages") for part in parts))
            )

    async def _return(self, names: Sequence[PrefixName]) -> None:
        try:
            returning = await self.engine.copy(partial(self._begin, names))
            if returning.wait is not None:
                await asyncio.to_thread(returning.wait)
                await self.engine.copy(partial(self._end, returning))
        except Exception as failure:
            # The session computes what is missing.
            log.error("pages did not come back from the memory of the machine", extra={"where": call_path(failure)})

    def _begin(self, names: Sequence[PrefixName]) -> ReturningPages:
        returning = self.store.begin_return(names)
        if returning.wait is None:
            self._end(returning)
        return returning

    def _end(self, returning: ReturningPages) -> None:
        num_pages = self.store.end_return(returning)
        num_whole = len({key.block_hash for key, _ in returning.names[:num_pages]})
        self.engine.metrics.host_hits.inc(num_whole * self.store.pool.page_tokens)
