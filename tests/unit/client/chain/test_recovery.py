"""A recovery and what comes in between. Where it finds servers, and how hops are filled, is the tests' own."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from corolla.chassis.errors import HopSessionLost, HopUnavailable
from corolla.client.chain.account import RecoveryAccount
from corolla.client.chain.history import StepShapes
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.moves import Moves
from corolla.client.chain.recovery import Recovery
from corolla.client.chain.replay import Places
from corolla.client.chain.reservations import ChainLimits, OpenOptions, Reservation
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2

CHAIN = common_pb2.Chain(
    hops=[common_pb2.Hop(server_id="a", address="a:1", span=common_pb2.BlockSpan(start=0, end=2))],
    fingerprint="weights",
)
LIMITS = ChainLimits(prefill_chunk_tokens=8, prefill_chunk_tokens_beside_decode=8, step_timeout_s=60.0, lease_ms=60_000)


class LostMember:
    """A sequence of four tokens."""

    position = 4
    shapes = StepShapes([4], 4)

    async def inputs(self, start: int, end: int) -> torch.Tensor:
        return torch.zeros(end - start, 1)


class SameRoutes:
    async def repaired(self, chain: common_pb2.Chain, lost: object, **_options: Any) -> common_pb2.Chain:
        return chain

    def avoid(self, server_id: str) -> None:
        pass


class EmptyReservations:
    """Every hop opens what it is asked for, and holds nothing of it."""

    async def open(self, identities: tuple[SessionIdentity, ...], *_args: Any) -> Reservation:
        return Reservation(CHAIN, 8, [[pb.Opened() for _ in identities]], 0)

    def give_back(self, *_args: Any) -> None:
        pass


def recovery_with(fill: Callable[[int], Any]) -> Recovery:
    async def run(places: Places, number: int, *_args: Any) -> None:
        await fill(number)

    routes: Any = SameRoutes()
    reservations: Any = EmptyReservations()
    replayer: Any = SimpleNamespace(run=run)
    return Recovery(routes, reservations, replayer, Moves(), LIMITS)


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
    places = Places(identities, CHAIN, OpenOptions(max_tokens=8, transient=True), 8)
    recovery = recovery_with(fill)
    recovering = asyncio.create_task(
        recovery.recover(places, [LostMember(), LostMember()], HopSessionLost("not held here"), RecoveryAccount(16))
    )
    await asyncio.wait({recovering}, timeout=30)
    assert recovering.cancelled()
    assert num_attempts == 1
