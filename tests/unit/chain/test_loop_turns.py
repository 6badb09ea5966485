"""Work that many sessions begin at one moment, in the turns of the event loop."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from corolla.chain.loop_turns import LoopTurns


class TurnCount:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._next = asyncio.get_running_loop().call_soon(self._count)
        try:
            yield
        finally:
            self._next.cancel()

    def _count(self) -> None:
        self.number += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)


async def went_on(turns: LoopTurns, num_callers: int, cancelled: range = range(0)) -> list[tuple[int, int]]:
    """The numbers of the callers in the order in which they went on, and of the turns in which they did."""
    found, count = [], TurnCount()

    async def go_on(number: int) -> None:
        await turns.next()
        found.append((number, count.number))

    with count.running():
        callers = [asyncio.create_task(go_on(number)) for number in range(num_callers)]
        await asyncio.sleep(0)
        for number in cancelled:
            callers[number].cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return found


async def test_few_callers_go_on_in_each_turn_in_the_order_in_which_they_came() -> None:
    turns = LoopTurns(3)
    for _ in range(2):
        found = await went_on(turns, 20)
        assert [number for number, _ in found] == list(range(20))
        in_turn = Counter(turn for _, turn in found)
        assert max(in_turn.values()) == 3
        assert len(in_turn) == 7


async def test_callers_that_are_cancelled_take_nobodys_place() -> None:
    found = await went_on(LoopTurns(3), 20, cancelled=range(3, 18))
    assert [number for number, _ in found] == [0, 1, 2, 18, 19]
    assert len({turn for _, turn in found}) == 2


async def test_a_caller_that_comes_while_few_do_does_not_wait_for_the_loop() -> None:
    turns = LoopTurns(2)
    for _ in range(2):
        with pytest.raises(StopIteration):
            turns.next().send(None)
    third = turns.next()
    assert third.send(None) is not None, "it waits"
    third.close()
