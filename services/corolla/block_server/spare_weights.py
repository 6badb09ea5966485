"""Keeps the weights of other servers' spans in the machine's memory, so that a move to one of them reads nothing."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.block_server.span_loader import Weights
from corolla.chassis.host_memory import available_bytes
from corolla.planning.spares import fitting, spans_to_keep
from corolla.v1 import router_pb2
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 1.0


@dataclass(frozen=True)
class Keeping:
    """What one incarnation of the server knows.

    Attributes:
        server_id: its id.
        placed: returns the servers of the placement that it has seen last.
        num_bytes: returns the bytes of a span's weights; None: the server may not hold the span.
        unused_page_bytes: returns the bytes of the machine's memory that sessions and standbys may still take.
        load: reads a span and lays it out. It is called in a thread. None: only the files are read.
    """

    server_id: str
    placed: Callable[[], Sequence[router_pb2.PlacedServer]]
    num_bytes: Callable[[Span], int | None]
    unused_page_bytes: Callable[[], int]
    load: Callable[[Span], Weights | None]


@dataclass(eq=False, repr=False)
class SpareWeights:
    """The kept weights of one process. They outlive its incarnations, which move to one of these spans after another.

    Args:
        max_bytes: the most bytes of the machine's memory; 0: nothing is kept.
        available: returns the bytes that the process could still allocate; None: not known.
    """

    max_bytes: int
    available: Callable[[], int | None] = available_bytes
    _kept: dict[Span, tuple[int, Weights | None]] = field(init=False, default_factory=dict)
    _fingerprint: str = field(init=False, default="")
    # What was wanted at the last look, and what that follows from.
    _wanted: list[Span] = field(init=False, default_factory=list)
    _wanted_by: tuple[Sequence[router_pb2.PlacedServer], str, list[Span]] = field(init=False, default=((), "", []))
    # The span that is read now, in a thread that outlives the incarnation that began it.
    _reading: tuple[Span, asyncio.Task[None]] | None = field(init=False, default=None)

    @property
    def spans(self) -> list[Span]:
        return sorted(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._kept.values())

    async def take(self, span: Span, fingerprint: str) -> Weights | None:
        """Returns the weights of an incarnation's own span, which are kept no more; None: they must be read.

        If an earlier incarnation began to read this span, the method waits for it.

        Args:
            fingerprint: identifies the weights: the files may have changed since the incarnation before.
        """
        if fingerprint != self._fingerprint:
            self._kept.clear()
            self._fingerprint = fingerprint
        elif self._reading is not None and self._reading[0] == span:
            await asyncio.wait({self._reading[1]})
        return self._kept.pop(span, (0, None))[1]

    async def run(self, keeping: Keeping) -> None:
        """Keeps those spans whose loss would cost most, for ever."""
        while True:
            await self.look(keeping)
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def look(self, keeping: Keeping) -> None:
        """Gives up what is wanted no more or has no room, and reads one span that is missing."""
        if self._reading is not None:
            await asyncio.wait({self._reading[1]})
        wanted = await self._now_wanted(keeping)
        sizes = {span: num_bytes for span in wanted if (num_bytes := keeping.num_bytes(span)) is not None}
        # A new span needs an eighth more room than it takes, so that none is given up and read again all the time.
        needed = {span: num_bytes if span in self._kept else num_bytes * 9 // 8 for span, num_bytes in sizes.items()}
        chosen = fitting([span for span in wanted if span in sizes], needed, self._room(keeping))
        for span in self._kept.keys() - chosen:
            del self._kept[span]
            log.info("gave up a spare span", extra={"blocks": str(span)})
        missing = next((span for span in chosen if span not in self._kept), None)
        if missing is not None:
            reading = asyncio.create_task(self._read(missing, sizes[missing], keeping.load), name="spare weights")
            self._reading = missing, reading
            await asyncio.shield(reading)

    async def _now_wanted(self, keeping: Keeping) -> list[Span]:
        placed, kept = keeping.placed(), self.spans
        if placed is not self._wanted_by[0] or (keeping.server_id, kept) != self._wanted_by[1:]:
            # Planning takes tens of milliseconds among a thousand servers.
            self._wanted = await asyncio.to_thread(spans_to_keep, placed, keeping.server_id, kept)
            self._wanted_by = placed, keeping.server_id, kept
        return self._wanted

    async def _read(self, span: Span, num_bytes: int, load: Callable[[Span], Weights | None]) -> None:
        fingerprint = self._fingerprint
        try:
            weights = await asyncio.to_thread(load, span)
        finally:
            self._reading = None
        if fingerprint == self._fingerprint:
            self._kept[span] = (num_bytes, weights)
            log.info("keeps a spare span", extra={"blocks": str(span), "mib": num_bytes >> 20})

    def _room(self, keeping: Keeping) -> int:
        """Pages come first: what sessions and standbys may still take is not spent on weights."""
        available = self.available()
        if available is None:
            return self.max_bytes
        # Files in the system's cache take nothing from what is available.
        num_own = sum(num_bytes for num_bytes, weights in self._kept.values() if weights is not None)
        return min(self.max_bytes, available + num_own - keeping.unused_page_bytes())
