"""A recovery and its interruptions. The tests replace the search for servers and the filling of hops."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from corolla.chain import recovery as recoveries
from corolla.chain.handovers import Handovers
from corolla.chain.history import ReplayInputs, StepShapes
from corolla.chain.identity import SessionIdentity
from corolla.chain.loop_turns import MOST_IN_A_TURN, LoopTurns
from corolla.chain.recovery import Recovery
from corolla.chain.recovery_budget import RecoveryBudget
from corolla.chain.reservations import ChainBinding, ChainLimits, NotOpened, OpenOptions
from corolla.chassis.errors import HopLate, HopSessionLost, HopUnavailable, QueueFull, RequestKillsServers
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

CHAIN = common_pb2.Chain(
    hops=[common_pb2.Hop(server_id="a", address="a:1", span=common_pb2.BlockSpan(start=0, end=2))],
    fingerprint="weights",
)
OPTIONS = OpenOptions(max_tokens=8, transient=True)
LIMITS = ChainLimits(prefill_chunk_tokens=8, fewer_during_decode=1, step_timeout_s=60.0, lease_ms=60_000)


class LostSequence:
    """A sequence of four tokens."""

    position = 4
    shapes = StepShapes([4], 4)

    def inputs(self, start: int, end: int) -> ReplayInputs:
        return ReplayInputs([0] * (end - start))


class SameRoutes:
    def __init__(self, left: Collection[str] = ()) -> None:
        self._left = left
        self.turns = LoopTurns()
        self.lost: frozenset[str] = frozenset()
        self.avoided: list[str] = []

    def is_leaving(self, server_id: str) -> bool:
        return server_id in self._left

    async def replace_lost(self, chain: common_pb2.Chain, lost: Collection[str], **_options: Any) -> common_pb2.Chain:
        self.lost = frozenset(lost)
        return chain

    def continued(self, before: common_pb2.Chain, after: common_pb2.Chain) -> common_pb2.Chain:
        return after

    def avoid(self, server_id: str) -> None:
        self.avoided.append(server_id)


class EmptyReservations:
    """Every hop opens each session, though not at once, and holds no token of it."""

    def __init__(self, num_refusals: int = 0) -> None:
        self._num_refusals = num_refusals

    async def open(self, identities: tuple[SessionIdentity, ...], *_args: Any) -> ChainBinding:
        if self._num_refusals:
            self._num_refusals -= 1
            raise NotOpened([(CHAIN.hops[0], QueueFull("too many sessions"))])
        options = OpenOptions(max_tokens=8, transient=True)
        return ChainBinding(identities, CHAIN, options, 8, [[pb.Opened() for _ in identities]])

    def give_back(self, *_args: Any) -> None:
        pass

    def held(self, _options: OpenOptions) -> dict[str, int]:
        return {}


def recovery_with(fill: Callable[[int], Any], routes: Any = None, num_refusals: int = 0) -> Recovery:
    async def replay(binding: ChainBinding, number: int, *_args: Any) -> int:
        await fill(number)
        return 0

    routes = SameRoutes() if routes is None else routes
    reservations: Any = EmptyReservations(num_refusals)
    replayer: Any = SimpleNamespace(replay=replay)
    return Recovery(routes, reservations, replayer, Handovers({"a:1"}), LIMITS)


async def test_a_recovery_that_is_cancelled_in_the_moment_of_a_failure_ends() -> None:
    num_attempts = 0

    async def fill(number: int) -> None:
        nonlocal num_attempts
        if number == 1:
            await asyncio.Event().wait()
        num_attempts += 1
        recovering.cancel()
        raise HopUnavailable("a hop of the chain was lost", "a:1")

    identities = tuple(SessionIdentity(bytes([number]) * 16, 1, "tenant") for number in range(2))
    binding = ChainBinding(identities, CHAIN, OpenOptions(max_tokens=8, transient=True), 8)
    recovery = recovery_with(fill)
    recovering = asyncio.create_task(
        recovery.recover(binding, [LostSequence(), LostSequence()], HopSessionLost("not held here"), RecoveryBudget(16))
    )
    await asyncio.wait({recovering}, timeout=30)
    assert recovering.cancelled()
    assert num_attempts == 1


async def test_a_turn_without_epochs_for_another_opening_ends() -> None:
    async def fill(number: int) -> None:
        raise AssertionError("nothing was opened")

    identity = SessionIdentity.of_turn("00" * 16, 7, "tenant").at_end_of_turn()
    binding = ChainBinding((identity,), CHAIN, OpenOptions(max_tokens=8, transient=False), 8)
    with pytest.raises(HopUnavailable):
        await recovery_with(fill).recover(
            binding, [LostSequence()], HopSessionLost("not held here"), RecoveryBudget(16)
        )
    assert binding.identities == (identity,), "it is parked in the epoch in which it was last open"


async def test_of_many_sessions_that_lose_a_server_at_once_few_begin_to_recover_in_a_turn_of_the_loop() -> None:
    turn, judged, begun = 0, list[int](), list[int]()

    class CountedRoutes(SameRoutes):
        def is_leaving(self, server_id: str) -> bool:
            judged.append(turn)
            return super().is_leaving(server_id)

        async def replace_lost(self, chain: common_pb2.Chain, *args: Any, **options: Any) -> common_pb2.Chain:
            begun.append(turn)
            return await super().replace_lost(chain, *args, **options)

    async def fill(_number: int) -> None:
        pass

    recovery, failure = recovery_with(fill, CountedRoutes()), HopUnavailable("a hop of the chain was lost", "a:1")
    recovering = [
        asyncio.create_task(recovery.recover(
            ChainBinding((SessionIdentity(bytes([number]) * 16, 1, "tenant"),), CHAIN, OPTIONS, 8),
            [LostSequence()], failure, RecoveryBudget(16),
        ))
        for number in range(50)
    ]  # fmt: skip
    while not all(each.done() for each in recovering):
        turn += 1
        await asyncio.sleep(0)
    assert len(begun) == 50
    assert max(Counter(begun).values()) == MOST_IN_A_TURN
    assert len(judged) == 50
    assert max(judged) <= 1, "the state of the server at its failure counts, however long a session waits for its turn"
    await asyncio.gather(*recovering)


@pytest.mark.parametrize("left", [(), ("a",)], ids=["died", "left"])
async def test_a_request_is_not_to_blame_for_servers_that_leave(left: Collection[str]) -> None:
    async def fill(_number: int) -> None:
        pass

    binding = ChainBinding(
        (SessionIdentity(bytes(16), 1, "tenant"),), CHAIN, OpenOptions(max_tokens=8, transient=True), 8
    )
    recovery = recovery_with(fill, SameRoutes(left))
    budget = RecoveryBudget(16)
    failure = HopUnavailable("a hop of the chain was lost", "a:1")
    await recovery.recover(binding, [LostSequence()], failure, budget)
    if left:
        await recovery.recover(binding, [LostSequence()], failure, budget)
    else:
        with pytest.raises(RequestKillsServers):
            await recovery.recover(binding, [LostSequence()], failure, budget)


@pytest.mark.parametrize("is_repeated", [False, True])
async def test_a_hop_that_is_late_is_left_out_if_it_was_silent_before(is_repeated: bool) -> None:
    async def fill(_number: int) -> None:
        pass

    identity = SessionIdentity(bytes(16), 1, "tenant")
    binding = ChainBinding((identity,), CHAIN, OpenOptions(max_tokens=8, transient=True), 8)
    routes = SameRoutes()
    failure = HopLate("a hop of the chain is late", "a:1")
    failure.is_repeated = is_repeated
    await recovery_with(fill, routes).recover(binding, [LostSequence()], failure, RecoveryBudget(16))
    assert routes.lost == {"a"}, "this session is replaced in either case"
    assert routes.avoided == (["a"] if is_repeated else [])


async def test_a_hop_that_is_busy_is_asked_again_and_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoveries, "LONGEST_BUSY_PAUSE_S", 0.01)
    filled: list[int] = []

    async def fill(number: int) -> None:
        filled.append(number)

    binding = ChainBinding(
        (SessionIdentity(bytes(16), 1, "tenant"),), CHAIN, OpenOptions(max_tokens=8, transient=True), 8
    )
    routes = SameRoutes()
    recovery = recovery_with(fill, routes, num_refusals=3)
    await recovery.recover(binding, [LostSequence()], HopSessionLost("not held here"), RecoveryBudget(16))
    assert filled == [0]
    assert binding.identities[0].epoch == 5
    assert not routes.lost
