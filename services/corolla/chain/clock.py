"""The event loop's clock. Waits and deadlines of this process are times of this clock."""

import asyncio


def time_s() -> float:
    """Returns the time of the running event loop, in seconds since an arbitrary moment."""
    return asyncio.get_running_loop().time()
