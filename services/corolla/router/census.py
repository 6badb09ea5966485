"""Counts on a timer what the store holds, for the gauges. Its snapshots also turn expired leases into changes."""

import asyncio

from corolla.chassis.errors import CorollaError
from corolla.router.metrics import RouterMetrics
from corolla.router.registry import Registry
from corolla.router.sessions import SessionRecords


async def run_census(registry: Registry, sessions: SessionRecords, metrics: RouterMetrics, interval_s: float) -> None:
    """Runs for ever; what Redis does not answer keeps its last value."""
    shown: set[str] = set()
    while True:
        try:
            for model in await registry.models():
                roster = await registry.snapshot(model)
                num_sessions = await sessions.count(model)
                if roster.is_known or num_sessions:
                    metrics.observe(roster, num_sessions)
                    shown.add(model)
                    continue
                await registry.forget(model)
                if model in shown:
                    metrics.forget(model)
                    shown.discard(model)
        except CorollaError:
            pass
        await asyncio.sleep(interval_s)
