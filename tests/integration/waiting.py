"""Waiting for conditions."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 30) -> None:
    """Asks again and again; TimeoutError when it never comes true. The time only ends a hang: a machine may pause."""
    async with asyncio.timeout(timeout_s):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)
