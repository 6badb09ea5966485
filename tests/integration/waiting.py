"""Waiting for conditions."""

import asyncio
import inspect
from collections.abc import Callable


async def until(holds: Callable[[], object], timeout_s: float = 30) -> None:
    """Asks again and again; TimeoutError when it never comes true. The time only ends a hang: a machine may pause.

    Args:
        holds: says what is true or false, or awaits it.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            held = holds()
            if await held if inspect.isawaitable(held) else held:
                return
            await asyncio.sleep(0.02)
