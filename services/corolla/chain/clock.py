"""The event loop's clock, by which this process counts how long it waits."""

import asyncio


def time_s() -> float:
    return asyncio.get_running_loop().time()
