"""Several streams as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _End:
    failure: Exception | None


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yields what any stream yields; the first failure ends them all. On leaving, all are closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[Item | _End] = asyncio.Queue(maxsize=2 * len(streams))

    async def drain(stream: AsyncGenerator[Item, None]) -> None:
        failure = None
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await queue.put(item)
        except Exception as error:
            failure = error
        await queue.put(_End(failure))

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            next_one = await queue.get()
            if not isinstance(next_one, _End):
                yield next_one
            elif next_one.failure is not None:
                raise next_one.failure
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
