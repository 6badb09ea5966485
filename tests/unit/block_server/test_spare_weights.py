"""A server keeps the weights of others' spans as far as memory goes that sessions and standbys do not need."""

import asyncio
import threading
from typing import Any, cast

import pytest

from corolla.block_server import spare_weights
from corolla.block_server.span_loader import Weights
from corolla.block_server.spare_weights import Keeping, SpareWeights
from corolla.planning.spares import spans_to_keep
from corolla.v1 import router_pb2
from corolla.wire.span import Span
from tests.unit.planning.test_spares import placed

BLOCK = 100


class Machine:
    """A machine whose memory the test sets; what is read is the span's name."""

    def __init__(self) -> None:
        self.available = 10_000
        self.unused_page_bytes = 0
        self.servers: list[router_pb2.PlacedServer] = [
            placed("own", "0:2"),
            placed("twin", "0:2"),
            placed("a", "2:4"),
            placed("b", "4:8"),
        ]
        self.read: list[str] = []
        self.is_cached = False
        self.is_reading, self.may_read = threading.Event(), threading.Event()
        self.may_read.set()
        self.spares = SpareWeights(1000, lambda: self.available)
        self.keeping = Keeping(
            "own", lambda: self.servers, lambda span: len(span) * BLOCK if len(span) < 6 else None,
            lambda: self.unused_page_bytes, self._load,
        )  # fmt: skip

    def _load(self, span: Span) -> Weights | None:
        self.read.append(str(span))
        self.is_reading.set()
        self.may_read.wait(60)
        if self.is_cached:
            return None
        self.available -= len(span) * BLOCK
        return cast(Weights, f"weights of {span}")

    async def look(self, times: int = 3) -> list[str]:
        for _ in range(times):
            await self.spares.look(self.keeping)
        return [str(span) for span in self.spares.spans]


async def test_a_span_is_read_once_and_taken_once() -> None:
    machine = Machine()
    assert await machine.look() == ["2:4", "4:8"]
    assert machine.read == ["2:4", "4:8"]
    assert machine.spares.num_bytes == 600
    assert cast(Any, await machine.spares.take(Span(4, 8), "")) == "weights of 4:8"
    assert await machine.spares.take(Span(4, 8), "") is None
    assert await machine.spares.take(Span(2, 4), "g") is None, "the files have changed"
    assert machine.spares.spans == []
    machine.servers = [*machine.servers, placed("c", "2:8")]
    assert "2:8" not in await machine.look(), "the server may not hold it"


async def test_what_sessions_and_standbys_may_still_take_is_not_spent() -> None:
    machine = Machine()
    machine.available, machine.unused_page_bytes = 1000, 500
    assert await machine.look() == ["2:4"], "the other one would leave no room for pages"
    # Standbys fill pages, which is what was kept free; another program takes the rest.
    machine.available, machine.unused_page_bytes = 450, 150
    assert await machine.look() == ["2:4"]
    machine.available, machine.unused_page_bytes = 0, 0
    assert await machine.look() == ["2:4"]
    machine.unused_page_bytes = 50
    assert await machine.look() == []
    machine.available, machine.unused_page_bytes = 460, 250
    assert await machine.look() == [], "so little more room may be gone the next moment"
    machine.available = 2000
    assert await machine.look() == ["2:4", "4:8"]


async def test_files_in_the_systems_cache_leave_no_room_twice() -> None:
    machine = Machine()
    machine.is_cached, machine.available, machine.unused_page_bytes = True, 1000, 500
    assert await machine.look() == ["2:4"], "the cache counts as available"


async def test_what_an_incarnation_began_to_read_the_next_one_takes() -> None:
    machine = Machine()
    machine.may_read.clear()
    looking = asyncio.create_task(machine.look())
    await asyncio.to_thread(machine.is_reading.wait, 60)
    looking.cancel()
    await asyncio.wait({looking})
    taking = asyncio.create_task(machine.spares.take(Span(2, 4), ""))
    await asyncio.sleep(0)
    machine.may_read.set()
    assert cast(Any, await taking) == "weights of 2:4"
    assert machine.read == ["2:4"]


async def test_a_placement_is_planned_with_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, threads = Machine(), list[int]()

    def planned(*given: Any) -> list[Span]:
        threads.append(threading.get_ident())
        return spans_to_keep(*given)

    monkeypatch.setattr(spare_weights, "spans_to_keep", planned)
    await machine.look(10)
    assert len(threads) == 3, "two spans are read, and then nothing changes"
    assert threading.get_ident() not in threads
    machine.servers = list(machine.servers)
    await machine.look()
    assert len(threads) == 4


async def test_spans_that_no_server_holds_any_more_are_given_up() -> None:
    machine = Machine()
    await machine.look()
    machine.servers = machine.servers[:-1]
    assert await machine.look() == ["2:4", "4:8"], "this one is lost, and the order comes in a moment"
    machine.servers = [*machine.servers, placed("c", "3:6"), placed("d", "6:8")]
    assert await machine.look() == ["2:4", "3:6", "6:8"]
    nothing = SpareWeights(0)
    await nothing.look(machine.keeping)
    assert nothing.spans == []
