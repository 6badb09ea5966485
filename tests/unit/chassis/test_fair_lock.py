"""Tenants take lock, and no tenant loses its turn."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.chassis.errors import QueueFull
from corolla.chassis.fair_lock import FairLock


class Sequencer:
    """Tasks that take lock, and the order in which they came to theirs."""

    def __init__(self, most_waiting: int = 1000) -> None:
        self.lock = FairLock(most_waiting, "too many")
        self.taken: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._num_inside = 0

    async def _take(self, tenant: str) -> None:
        async with self.lock.hold(tenant):
            self._num_inside += 1
            assert self._num_inside == 1
            self.taken.append(tenant)
            try:
                await asyncio.sleep(0)
            finally:
                self._num_inside -= 1

    async def come(self, tenants: Sequence[str]) -> None:
        """One after the other; the first of all begins at once."""
        for tenant in tenants:
            self.tasks.append(asyncio.create_task(self._take(tenant)))
        await asyncio.sleep(0)

    async def end(self) -> None:
        with suppress(QueueFull):
            await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 10)


@given(st.lists(st.sampled_from(["a", "b", "c", "a turn ends"]), max_size=60))
def test_while_a_tenant_waits_each_other_one_has_at_most_one_turn_more(happenings: list[str]) -> None:
    async def run() -> None:
        lock, ending = FairLock(1000, ""), asyncio.Semaphore(0)
        waiting, taken = Counter[str](), list[str]()

        async def take(tenant: str) -> None:
            waiting[tenant] += 1
            async with lock.hold(tenant):
                waiting[tenant] -= 1
                taken.append(tenant)
                await ending.acquire()

        # Turns of others since a tenant began to wait, or had a turn itself.
        meanwhile: dict[str, Counter[str]] = {}
        tasks: list[asyncio.Task[None]] = []
        for happening in [*happenings, *["a turn ends"] * len(happenings)]:
            num_before = len(taken)
            if happening in "abc":
                tasks.append(asyncio.create_task(take(happening)))
            elif sum(task.done() for task in tasks) < len(tasks):
                ending.release()
            for _ in range(9):
                await asyncio.sleep(0)
            for tenant in taken[num_before:]:
                meanwhile.pop(tenant, None)
                for others in meanwhile.values():
                    others[tenant] += 1
                    assert others[tenant] <= 1
            for tenant in +waiting:
                meanwhile.setdefault(tenant, Counter())
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(run())


async def test_a_tenant_whose_waiters_left_owes_no_turns() -> None:
    sequencer = Sequencer()
    await sequencer.come(["noisy"] * 9 + ["quiet"] * 20)
    for task in sequencer.tasks[9:]:
        task.cancel()
    await sequencer.come(["quiet"])
    await sequencer.end()
    assert sequencer.taken.index("quiet") <= 2


async def test_those_of_one_tenant_come_in_order() -> None:
    lock, order = FairLock(100, ""), list[int]()

    async def take(number: int) -> None:
        async with lock.hold("one"):
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*map(take, range(20)))
    assert order == list(range(20))


async def test_where_the_line_is_full_the_longest_one_makes_room() -> None:
    sequencer = Sequencer(most_waiting=4)
    await sequencer.come(["noisy"] * 6 + ["quiet"])
    refused = [task for task in sequencer.tasks if task.done()]
    await sequencer.end()
    assert sorted(sequencer.taken) == ["noisy"] * 4 + ["quiet"]
    assert all(isinstance(task.exception(), QueueFull) for task in refused)
    assert sum(task.exception() is not None for task in sequencer.tasks) == 2


async def test_a_failure_ends_a_turn() -> None:
    lock = FairLock(9, "")
    for _ in range(2):
        with pytest.raises(ValueError, match="oh"):
            async with lock.hold("one"):
                raise ValueError("oh")


@given(
    tenants=st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
    cancelled=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 6)), max_size=8),
)
def test_whoever_leaves_takes_no_turn_away(tenants: list[str], cancelled: list[tuple[int, int]]) -> None:
    async def run() -> None:
        sequencer = Sequencer()
        await sequencer.come(tenants)
        for number, num_rounds in cancelled:
            for _ in range(num_rounds):
                await asyncio.sleep(0)
            sequencer.tasks[number % len(tenants)].cancel()
        await sequencer.end()
        left = [task.cancelled() for task in sequencer.tasks]
        assert len(sequencer.taken) >= left.count(False)
        async with asyncio.timeout(1), sequencer.lock.hold("last"):
            pass

    asyncio.run(run())
