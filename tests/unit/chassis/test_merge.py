import asyncio
from collections.abc import AsyncGenerator

import pytest

from corolla.chassis.merge import merge


class Streams:
    """Streams of numbers, and which of them have been closed."""

    def __init__(self) -> None:
        self.closed: set[str] = set()

    async def counting(self, name: str, length: int, pause_s: float = 0.0) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for number in range(length):
                await asyncio.sleep(pause_s)
                yield name, number
        finally:
            self.closed.add(name)

    async def failing(self, name: str) -> AsyncGenerator[tuple[str, int], None]:
        try:
            yield name, 0
            raise LookupError(name)
        finally:
            self.closed.add(name)


@pytest.mark.parametrize("num_streams", [1, 5])
async def test_everything_comes_once_and_in_the_order_of_its_stream(num_streams: int) -> None:
    streams = Streams()
    names = [str(number) for number in range(num_streams)]
    items = [(index, item) async for index, item in merge([streams.counting(name, 20) for name in names])]
    for name in names:
        assert [number for index, (each, number) in items if each == name == str(index)] == list(range(20))
    assert streams.closed == set(names)


async def test_a_quick_stream_does_not_wait_for_a_slow_one() -> None:
    streams = Streams()
    merged = merge([streams.counting("slow", 1, pause_s=60), streams.counting("quick", 3)])
    assert [await anext(merged) for _ in range(3)] == [(1, ("quick", number)) for number in range(3)]
    await merged.aclose()
    assert streams.closed == {"slow", "quick"}


@pytest.mark.parametrize("num_others", [0, 3])
async def test_the_first_failure_ends_all(num_others: int) -> None:
    streams = Streams()
    others = [streams.counting(f"{number}", 1000, pause_s=0.001) for number in range(num_others)]

    async def read() -> None:
        async for _ in merge([streams.failing("bad"), *others]):
            pass

    with pytest.raises(LookupError):
        await read()
    assert streams.closed == {"bad", *(f"{number}" for number in range(num_others))}


async def test_a_reader_that_is_cancelled_closes_all_streams() -> None:
    streams = Streams()

    async def read() -> None:
        async for _ in merge([streams.counting("a", 10_000, 0.001), streams.counting("b", 10_000, 0.001)]):
            await asyncio.sleep(60)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(0.01)
    assert streams.closed == {"a", "b"}


async def test_streams_do_not_run_ahead_of_their_reader() -> None:
    produced = 0

    async def eager() -> AsyncGenerator[int, None]:
        nonlocal produced
        while True:
            produced += 1
            yield produced

    merged = merge([eager(), eager()])
    await anext(merged)
    await asyncio.sleep(0.02)
    assert produced <= 8
    await merged.aclose()
