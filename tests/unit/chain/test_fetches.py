"""Beginnings of texts that hops fetch. The test replaces the search for servers and the streams to them."""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from corolla.chain.fetches import Fetches
from corolla.chain.identity import SessionIdentity
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

IDENTITY = SessionIdentity(bytes(16), 1, "tenant")
HELD = {"holds all": 1000, "holds some": 600}


def a_hop(name: str, start: int, end: int) -> common_pb2.Hop:
    return common_pb2.Hop(server_id=name, address=f"{name}:1", span=common_pb2.BlockSpan(start=start, end=end))


CHAIN = common_pb2.Chain(hops=[a_hop("a", 0, 10), a_hop("b", 10, 20)])


class Routes:
    """Servers of all blocks hold a text; hops fetch 500 tokens in the time in which they compute them."""

    def apart_from(self, _server_ids: Collection[str]) -> frozenset[str]:
        return frozenset()

    def holder_for(
        self, hop: common_pb2.Hop, excluded: Collection[str], held: Mapping[str, int]
    ) -> common_pb2.Hop | None:
        name = max(set(held).difference(excluded), key=held.__getitem__, default=None)
        return None if name is None else a_hop(name, hop.span.start, hop.span.end)

    def filling_seconds(self, _hop: common_pb2.Hop, num_tokens: int) -> tuple[float, float]:
        return num_tokens / 5000, 0.1


class Plane:
    """Servers that copy a session at once.

    Args:
        parts: how many tokens have arrived after each part; with the last one, the copy is over or stands still.
    """

    def __init__(self, parts: Sequence[int | None] = (None,)) -> None:
        self.parts = parts
        self.fetching: dict[tuple[bytes, str], Callable[[int | None], None]] = {}
        self.named = list[tuple[str, str]]()
        self.closed = list[str]()

    async def connect(self, _address: str) -> pb.Welcome:
        await asyncio.sleep(0)
        return pb.Welcome(takes_standbys=True)

    def notify(self, address: str, control: pb.Standby) -> None:
        self.named.append((address, control.hop.server_id))
        for num_tokens in self.parts:
            self.fetching[control.session_id, address](num_tokens)

    def close_session(self, hops: Sequence[common_pb2.Hop], _identity: SessionIdentity) -> None:
        self.closed += [hop.server_id for hop in hops]


async def open_on(server: common_pb2.Hop, _num_tokens: int, _transfer_id: bytes) -> pb.Opened:
    await asyncio.sleep(0)
    return pb.Opened(num_cached_tokens=HELD.get(server.server_id, 0))


@pytest.mark.parametrize("held, fetched", [({"holds all": 1000}, [True, False]), (HELD, [True, True])])
async def test_a_server_gives_to_one_hop_of_a_session(held: Mapping[str, int], fetched: list[bool]) -> None:
    routes: Any = Routes()
    plane: Any = Plane()
    fetches = Fetches(routes, plane)
    have_some = await asyncio.gather(
        *(fetches.fetch(hop, CHAIN, IDENTITY, held, open_on, math.inf) for hop in CHAIN.hops)
    )
    assert have_some == fetched
    assert plane.named == list(zip([f"{name}:1" for name in held], "ab", strict=False))
    assert plane.closed == list(held)
    assert not plane.fetching


async def test_a_fetch_ends_with_its_request() -> None:
    routes: Any = Routes()
    plane: Any = Plane(parts=())
    until_s = asyncio.get_running_loop().time() + 0.02
    fetching = Fetches(routes, plane).fetch(CHAIN.hops[0], CHAIN, IDENTITY, {"holds all": 10**9}, open_on, until_s)
    async with asyncio.timeout(60):
        await fetching
    assert plane.closed[0] == "holds all"
    assert not plane.fetching


async def test_a_fetch_that_falls_behind_computing_ends_with_what_has_arrived() -> None:
    """A hundred tokens came at once, so a hundred more may take as long as computing all of them four times."""
    routes: Any = Routes()
    plane: Any = Plane(parts=(100,))
    began_s = asyncio.get_running_loop().time()
    fetching = Fetches(routes, plane).fetch(CHAIN.hops[0], CHAIN, IDENTITY, {"holds all": 10**9}, open_on, math.inf)
    async with asyncio.timeout(60):  # to compute all takes two days
        assert await fetching
    assert asyncio.get_running_loop().time() - began_s >= 0.1 + 4 * 200 / 5000
    assert plane.closed == ["holds all"]


async def test_a_fetch_that_keeps_up_goes_on() -> None:
    routes: Any = Routes()
    plane: Any = Plane(parts=(100, 200, 300, None))
    fetching = Fetches(routes, plane).fetch(CHAIN.hops[0], CHAIN, IDENTITY, HELD, open_on, math.inf)
    assert await fetching
    assert plane.closed == ["holds all"]
