"""Merges several streams into one, in the order in which their items arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields `(index, item)` for each item of any stream. The first failure ends all streams, as closing this does."""
    if len(streams) == 1:  # it needs no task
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def drain(index: int, stream: AsyncGenerator[Item, None]) -> None:
        failure = None
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await queue.put((index, item))
        except Exception as error:
            failure = error
        await queue.put(failure)

    tasks = [asyncio.create_task(drain(*each)) for each in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            next_one = await queue.get()
            if next_one is None:
                num_open -= 1
            elif isinstance(next_one, Exception):
                raise next_one
            else:
                yield next_one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
