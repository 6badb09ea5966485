"""One lane of a recovery: a session's past, step by step, through the hops that need it."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch

from corolla.chassis.errors import CorollaError, HopLeaving, OutOfPages
from corolla.client.chain.awaited import RowFuture, arrived, give_up
from corolla.client.chain.history import StepShapes
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.recovery_plan import CLIENT, Lane
from corolla.client.chain.reservations import ChainLimits, NotOpened, OpenOptions, Reservations
from corolla.client.chain.streams import DataPlane
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.tensors import tensor_type, to_payload

MAX_CHUNKS_UNDER_WAY_PER_HOP: Final = 2


class Member(Protocol):
    """A sequence whose hops are to be filled."""

    @property
    def position(self) -> int:
        """How many tokens every hop must hold."""

    @property
    def shapes(self) -> StepShapes:
        """The steps in which it processed them, and perhaps more."""

    async def inputs(self, start: int, end: int) -> torch.Tensor:
        """`[end - start, H]`, what went into the first block for these tokens."""


@dataclass(slots=True)
class Places:
    """Where sessions are open: on every hop of one chain, in one epoch. A recovery moves them.

    Attributes:
        max_step_tokens: that every hop takes in one step.
        opened: the identities when every hop of the chain was last open.
    """

    identities: tuple[SessionIdentity, ...]
    chain: common_pb2.Chain
    options: OpenOptions
    max_step_tokens: int
    opened: tuple[SessionIdentity, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.opened = self.identities

    def reopened(self) -> None:
        """From now on in the next epoch; what is said in the old one counts no longer."""
        self.identities = tuple(identity.reopened() for identity in self.identities)

    def open_on(self, chain: common_pb2.Chain, max_step_tokens: int) -> None:
        """Every hop of this chain has opened them now."""
        self.chain, self.max_step_tokens, self.opened = chain, max_step_tokens, self.identities


class Replayer:
    """Runs lanes."""

    def __init__(self, reservations: Reservations, plane: DataPlane, limits: ChainLimits) -> None:
        self._reservations = reservations
        self._plane = plane
        self._limits = limits
        self._budget = _TokenBudget(limits.max_replayed_tokens)

    async def run(self, places: Places, number: int, member: Member, lane: Lane) -> None:
        """Returns when the lane's hops hold the member up to its position, save those that only helped.

        Args:
            number: of the member among the identities.

        Raises:
            CorollaError: OutOfPages where a helping hop has no room, OutputsNotKept, or what else failed.
        """
        hops = list(places.chain.hops[lane.first : lane.last + 1])
        max_under_way = MAX_CHUNKS_UNDER_WAY_PER_HOP * len(hops)
        under_way: deque[RowFuture] = deque()
        async with (
            self._budget.of(member.position - lane.start),
            self._scratch(places, number, member, lane) as scratch,
        ):
            try:
                for start, end in self._steps(places, member, lane):
                    if len(under_way) == max_under_way:
                        await arrived(under_way[0], self._limits.step_timeout_s)
                        del under_way[0]
                    row = pb.StepRow(
                        session_id=places.identities[number].session_id,
                        epoch=places.identities[number].epoch,
                        position=start,
                        num_tokens=end - start,
                        scratch_session_id=scratch,
                    )
                    step = pb.Step(rows=[row], scratch_hops=lane.scratch_mask)
                    if lane.source == CLIENT:
                        hidden = await member.inputs(start, end)
                        step.dtype, step.hidden_size = tensor_type(hidden.dtype), hidden.shape[1]
                        under_way.extend(self._plane.step(hops, step, to_payload(hidden)))
                    else:
                        under_way.extend(self._plane.resend(places.chain.hops[lane.source], hops, step))
                while under_way:
                    await arrived(under_way[0], self._limits.step_timeout_s)
                    del under_way[0]
            finally:
                give_up(under_way)

    def _steps(self, places: Places, member: Member, lane: Lane) -> Sequence[tuple[int, int]]:
        max_tokens = min(self._limits.prefill_chunk_tokens, places.max_step_tokens)
        steps = member.shapes.replay(lane.start, max_tokens, merges=self._limits.merges_replayed_steps)
        position = member.position
        return [(start, min(end, position)) for start, end in steps if start < position]

    @asynccontextmanager
    async def _scratch(self, places: Places, number: int, member: Member, lane: Lane) -> AsyncIterator[bytes]:
        """A session on the hops that only help, which leaves what they hold alone."""
        if not lane.scratch:
            yield b""
            return
        identity = replace(places.identities[number], session_id=secrets.token_bytes(16))
        prompts = places.options.prompts
        options = replace(
            places.options,
            max_tokens=member.position,
            transient=True,
            recorded=None,
            # Of what lies in a cache, nothing would come out.
            texts=None,
            prompts=None if prompts is None else [prompts[number]],
            keeps_outputs=False,
        )
        hops = [places.chain.hops[hop] for hop in sorted(lane.scratch)]
        try:
            await self._reservations.open([identity], options, common_pb2.Chain(hops=hops))
            yield identity.session_id
        except NotOpened as refused:
            failure = refused.failures[0][1]
            if isinstance(failure, HopLeaving):
                # It goes on with what it holds, until that is elsewhere; there is no room for anything beside it.
                raise OutOfPages("a hop that leaves takes no further session") from None
            raise failure if isinstance(failure, CorollaError) else refused from None
        finally:
            self._reservations.give_back([identity], hops)


class _TokenBudget:
    """Bounds the tokens that are replayed at a time; who comes first goes first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_taken = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def of(self, num_tokens: int) -> AsyncIterator[None]:
        num_tokens = min(num_tokens, self._max_tokens)
        async with self._turn:
            while self._num_taken + num_tokens > self._max_tokens:
                self._freed.clear()
                await self._freed.wait()
            self._num_taken += num_tokens
        try:
            yield
        finally:
            self._num_taken -= num_tokens
            self._freed.set()
