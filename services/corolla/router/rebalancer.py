"""Orders block servers to move, one at a time, when the placement is stable and another layout is better."""

import asyncio
import logging
from collections.abc import Sequence

from corolla.chassis.errors import CorollaError
from corolla.router.intervals import RouterIntervals
from corolla.router.metrics import RouterMetrics
from corolla.router.rebalancing import Member, Move, next_move
from corolla.router.registry import Registry
from corolla.router.roster import Roster

log = logging.getLogger(__name__)

_Advice = tuple[Sequence[Member], Move | None]


class Rebalancer:
    """Orders moves. Each router decides by itself; the store accepts an order only when no move is under way.

    Args:
        min_gain: The fraction by which a move must make the slowest block faster.
    """

    def __init__(self, registry: Registry, metrics: RouterMetrics, min_gain: float, intervals: RouterIntervals) -> None:
        self._registry = registry
        self._metrics = metrics
        self._settle_s = intervals.settle_s
        self._min_gain = min_gain
        self._pause_ms = round(intervals.between_moves_s * 1000)
        # The members and the best move at the last look, by model and fingerprint.
        self._advice: dict[tuple[str, str], _Advice] = {}

    async def run(self) -> None:
        """Looks at the placements of all models again and again, for ever."""
        while True:
            try:
                async for roster in self._registry.rosters():
                    await self._look(roster)
            except CorollaError:
                self._advice.clear()
            await asyncio.sleep(self._settle_s)

    async def _look(self, roster: Roster) -> None:
        """Orders a model's best move if it was also the best one at the last look."""
        groups = roster.members() if roster.is_settled else {}
        for key in [key for key in self._advice if key[0] == roster.model and key[1] not in groups]:
            del self._advice[key]
        for fingerprint, members in groups.items():
            key = (roster.model, fingerprint)
            before, advised = self._advice.get(key, ((), None))
            if members == before:
                move = advised
            else:
                move = await asyncio.to_thread(next_move, members, roster.num_blocks, min_gain=self._min_gain)
            self._advice[key] = (members, move)
            if move is not None and move == advised and await self._registry.order(roster, move, self._pause_ms):
                self._metrics.move_ordered(roster.model, covers=move.covers)
                log.info("a block server moves", extra={"model": roster.model, "to": str(move.span)})
                return
