"""What a block server does on a timer: leases end, gauges are refreshed."""

import asyncio
from collections.abc import Callable
from typing import Final

from corolla.block_server.engine import Engine
from corolla.block_server.iteration import StepWork
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.outputs import OutputStore
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.sessions import SessionTable

_INTERVAL_S: Final = 1.0


async def keep_house(
    engine: Engine,
    scheduler: Scheduler[StepWork],
    sessions: SessionTable[SessionCache],
    outputs: OutputStore,
    metrics: BlockServerMetrics,
    *,
    page_bytes: Callable[[], int],
) -> None:
    """Runs for ever."""

    def expire() -> None:
        metrics.expired.inc(sessions.expire(engine.clock()))

    while True:
        engine.between_iterations(expire, max_released_pages=0)  # nobody is told to wait for a lease to run out
        metrics.observe_sessions(sessions, outputs, page_bytes(), len(scheduler))
        await asyncio.sleep(_INTERVAL_S)
