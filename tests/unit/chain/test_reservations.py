"""Hops that have too many sessions to open. The test replaces the search for servers and the streams to them."""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.chain import reservations
from corolla.chain.beginnings import STRIDE_TOKENS, Beginnings
from corolla.chain.fetches import Fetches
from corolla.chain.identity import SessionIdentity
from corolla.chain.reservations import ChainLimits, OpenOptions, Reservations
from corolla.chassis.errors import AdapterNotLoaded, CorollaError, NoAdapterRoom, NoChain, OutOfPages, QueueFull
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.page_hashes import TextDigests

SPAN = common_pb2.BlockSpan(start=0, end=2)
CHAIN = common_pb2.Chain(hops=[common_pb2.Hop(server_id="a", address="a:1", span=SPAN)], fingerprint="weights")
IDENTITY = SessionIdentity(bytes(16), 1, "tenant")


class BusyPlane:
    """A hop that refuses the first sessions that it is to open."""

    def __init__(self, num_refusals: int, refusal: CorollaError | None = None) -> None:
        self.num_refusals = num_refusals
        self.refusal = refusal or QueueFull("too many sessions")

    async def connect(self, _address: str) -> pb.Welcome:
        return pb.Welcome(span=SPAN)

    async def open(self, *_args: Any) -> pb.Opened:
        if self.num_refusals:
            self.num_refusals -= 1
            raise self.refusal
        return pb.Opened()

    def welcome(self, _address: str) -> pb.Welcome:
        return pb.Welcome()

    def close_session(self, *_args: Any) -> None:
        pass


def reservations_on(plane: Any, patience_s: float) -> Reservations:
    async def plan(*, excluded_ids: frozenset[str], are_some_full: bool, **_options: Any) -> common_pb2.Chain:
        if excluded_ids:
            raise OutOfPages("too few pages") if are_some_full else NoChain("no server")
        return CHAIN

    beginnings = SimpleNamespace(remember=lambda *_args: None, held=lambda *_args: {})
    routes: Any = SimpleNamespace(
        plan=plan, on_open_refused=lambda *_args: None, is_settling=False, beginnings=beginnings,
        ready_in_s=lambda lost: math.inf,
        needs_text_in_common=lambda *_args: False, apart_from=lambda _ids: frozenset(),
    )  # fmt: skip
    limits = ChainLimits(8, step_timeout_s=60.0, lease_ms=60_000, recovery_patience_s=patience_s)
    return Reservations(routes, plane, limits)


async def test_a_hop_that_is_busy_is_asked_again_until_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "LONGEST_BUSY_PAUSE_S", 0.01)
    options = OpenOptions(max_tokens=8, transient=True)
    plane = BusyPlane(num_refusals=5)
    binding = await reservations_on(plane, 30.0).reserve([IDENTITY], options)
    assert (binding.chain, plane.num_refusals) == (CHAIN, 0)
    with pytest.raises(QueueFull):
        await reservations_on(BusyPlane(1000), 0.05).reserve([IDENTITY], options)


@pytest.mark.parametrize("refusal", [NoAdapterRoom("no memory for it"), AdapterNotLoaded("not its bytes")])
async def test_who_asks_for_an_adapter_learns_why_no_server_has_it(refusal: CorollaError) -> None:
    with pytest.raises(type(refusal)):
        await reservations_on(BusyPlane(1000, refusal), 30.0).reserve([IDENTITY], OpenOptions(8, transient=True))


@pytest.mark.parametrize(
    "num_held, room_tokens, patience_s, num_opens",
    [(64, 30, 60.0, 6), (0, 30, 60.0, 1), (64, 20, 60.0, 1), (64, 90, 60.0, 1), (64, 30, 0.0, 1)],
    ids=["waits", "nobody has begun", "full", "has room without", "too late"],
)
async def test_a_session_waits_for_pages_of_its_text_that_others_compute(
    monkeypatch: pytest.MonkeyPatch, num_held: int, room_tokens: int, patience_s: float, num_opens: int
) -> None:
    """It does so only where these pages make the difference."""
    monkeypatch.setattr(reservations, "LONGEST_BUSY_PAUSE_S", 0.001)
    plane = BusyPlane(5, OutOfPages("too few pages"))
    opening = reservations_on(plane, patience_s)
    routes: Any = opening.routes
    routes.beginnings.held = lambda *_args: {"a": num_held} if num_held else {}
    routes.needs_text_in_common = lambda num_tokens, held: num_tokens - held.get("a", 0) <= room_tokens < num_tokens
    routes.holder_for = lambda *_args: None
    options = OpenOptions(max_tokens=90, transient=True, texts=[TextDigests(range(80))])
    if num_opens > 5:
        assert (await opening.reserve([IDENTITY], options)).chain == CHAIN
    else:
        with pytest.raises(OutOfPages):
            await opening.reserve([IDENTITY], options)
        assert plane.num_refusals == 5 - num_opens


class UnevenPlane:
    """Two hops of which the first one holds more of a text than the second, and shares it."""

    def __init__(self, *, is_full: bool = False, is_slow: bool = False) -> None:
        self.is_full = is_full
        self.is_slow = is_slow
        self.is_waiting = asyncio.Event()
        self.closed = list[str]()
        self.opens = list[tuple[str, int, bool]]()
        self.taken_back = list[str]()

    async def connect(self, address: str) -> pb.Welcome:
        return pb.Welcome(span=common_pb2.BlockSpan(start=0, end=4), page_tokens=16)

    async def open(self, address: str, request: pb.Open, _payload: Any) -> pb.Opened:
        self.opens.append((address, request.write_start, request.resume))
        if len(self.opens) > 2 and self.is_full:
            raise OutOfPages("too few pages")
        if len(self.opens) > 2 and self.is_slow:
            self.is_waiting.set()
            await asyncio.Event().wait()
        num_held = 64 if address == "a:1" else 32
        return pb.Opened(num_cached_tokens=num_held, common_end=min(num_held, request.write_start))

    def notify(self, address: str, control: pb.Truncate) -> None:
        assert control.idle
        self.taken_back.append(address)

    def welcome(self, _address: str) -> pb.Welcome:
        return pb.Welcome()

    def close_session(self, hops: Sequence[common_pb2.Hop], _identity: SessionIdentity) -> None:
        self.closed += [hop.server_id for hop in hops]


UNEVEN = OpenOptions(
    max_tokens=90, transient=True, texts=[TextDigests(range(80))], write_start=reservations.ALL_TOKENS,
    only_chain=common_pb2.Chain(
        hops=[
            common_pb2.Hop(server_id=name, address=f"{name}:1", span=common_pb2.BlockSpan(start=start, end=start + 2))
            for name, start in (("a", 0), ("b", 2))
        ],
        fingerprint="weights",
    ),
)  # fmt: skip


async def test_a_caller_that_goes_while_a_hop_is_opened_again_leaves_no_session() -> None:
    plane = UnevenPlane(is_slow=True)
    opening = asyncio.create_task(reservations_on(plane, 1.0).reserve([IDENTITY], UNEVEN))
    await plane.is_waiting.wait()
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert plane.closed == ["a", "b"]


@pytest.mark.parametrize("is_full, has_replica", [(False, True), (True, False), (True, True)])
async def test_a_hop_that_shares_more_than_another_one_is_opened_again(is_full: bool, has_replica: bool) -> None:
    """Where it has no room for copies, a replica of the other one may hold as much."""
    plane, refused = UnevenPlane(is_full=is_full), list[str]()
    opening = reservations_on(plane, 1.0)
    routes: Any = opening.routes
    routes.on_open_refused = lambda server_id, _failure: refused.append(server_id)
    routes.has_replica = lambda _hop: has_replica
    if is_full:
        with pytest.raises(OutOfPages):
            await opening.reserve([IDENTITY], UNEVEN)
        assert refused == ["b" if has_replica else "a"]
    else:
        binding = await opening.reserve([IDENTITY], UNEVEN)
        assert (binding.num_cached_tokens, binding.write_start) == (32, 32)
    assert plane.opens == [("a:1", 80, False), ("b:1", 80, False), ("a:1", 32, True)]
    assert plane.taken_back == ["a:1"]


async def test_what_was_fetched_is_resumed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hop that comes back later is fresh, or holds drafts that were taken back meanwhile."""
    resumed = list[bool]()

    class Plane(BusyPlane):
        async def open(self, _address: str, request: pb.Open, _payload: Any) -> pb.Opened:
            resumed.append(request.resume)
            return pb.Opened()

    async def fetch(*_args: Any) -> bool:
        return True

    monkeypatch.setattr(Fetches, "fetch", fetch)
    opening = reservations_on(Plane(0), 1.0)
    routes: Any = opening.routes
    routes.beginnings.held = lambda *_args: {"b": 64}
    binding = await opening.reserve(
        [IDENTITY], OpenOptions(max_tokens=90, transient=True, texts=[TextDigests(range(80))])
    )
    await opening.open([IDENTITY.in_next_epoch()], binding.open_options, CHAIN)
    assert resumed == [True, False]


def test_only_servers_that_share_pages_count_as_holders_of_texts() -> None:
    """A server without a prefix cache, or whose sessions have recurrent states, holds a text for its session only."""
    hops = [common_pb2.Hop(server_id=name, address=name) for name in ("shares", "does not")]
    plane: Any = SimpleNamespace(welcome=lambda address: pb.Welcome(page_tokens=32 * (address == "shares")))
    routes: Any = SimpleNamespace(beginnings=Beginnings())
    options, text = OpenOptions(max_tokens=128, transient=True), TextDigests(range(STRIDE_TOKENS))
    chain = common_pb2.Chain(hops=hops)
    Reservations(routes, plane, ChainLimits(8, step_timeout_s=60.0, lease_ms=60_000)).remember(chain, options, text)
    assert routes.beginnings.held(text, options.beginning_salt) == {"shares": STRIDE_TOKENS}
