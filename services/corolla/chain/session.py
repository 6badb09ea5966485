"""Sessions on chains: the position of each, and the steps that move it."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import torch

from corolla.chain.history import StepShapes, TokenHistory
from corolla.chain.identity import SessionIdentity
from corolla.chain.microbatches import Microbatcher
from corolla.chain.pending import RowFuture, RowResult, discard, wait_for_result
from corolla.chain.recovery import Recovery
from corolla.chain.recovery_budget import RecoveryBudget, RecoveryReport
from corolla.chain.replay import MAX_CHUNKS_UNDER_WAY_PER_HOP, Replayer
from corolla.chain.reservations import ChainBinding, ChainLimits, OpenOptions, Reservations
from corolla.chain.routes import Routes
from corolla.chain.row_sampling import RowOutput, SampledTokens, TokenSampler, embed, sample_rows
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopLeaving, InternalError
from corolla.decoding.compute_thread import ComputeThread
from corolla.models.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.page_hashes import TextDigests

Result = TypeVar("Result")

MIN_CHUNK_TOKENS: Final = 64
"""Fewer rows than this multiply a matrix at a clearly higher price each."""

_CHUNKS_PER_HOP: Final = 4


def chunk_tokens(num_tokens: int, num_hops: int, max_tokens: int) -> int:
    """Tokens of each chunk of a prompt of `num_tokens`, at most `max_tokens`; the last chunk may have fewer.

    With `k` chunks, `s` hops are busy together but for `s - 1` of `k + s - 1` rounds, so a prompt wants several chunks
    for each hop. Chunks that are too small cost more than they hide, and so do those of a single hop.
    """
    if num_hops == 1:
        return max_tokens
    even = -(-num_tokens // (_CHUNKS_PER_HOP * num_hops))
    return min(max(even, MIN_CHUNK_TOKENS), max_tokens)


class ChainSession:
    """A session that is open on every hop of a chain.

    `position` is the one authoritative count of processed tokens: it moves when a step came back from the last hop, and
    each step carries it. A step that a hop lost is sent again from the same position once the session has recovered.

    Attributes:
        num_cached_tokens: tokens that all hops held when the session was opened.
    """

    def __init__(
        self,
        binding: ChainBinding,
        plane: DataPlane,
        recovery: Recovery,
        budget: RecoveryBudget,
        microbatcher_of: Callable[[ChainBinding], Microbatcher],
        edges: Edges,
        compute: ComputeThread,
        limits: ChainLimits,
    ) -> None:
        self.num_cached_tokens = binding.num_cached_tokens
        self._binding = binding
        self._plane = plane
        self._recovery = recovery
        self._budget = budget
        self._microbatcher_of = microbatcher_of
        self._microbatcher = microbatcher_of(binding)
        self._edges = edges
        self._compute = compute
        self._limits = limits
        self._history = TokenHistory()
        self._newest: SampledTokens | None = None

    @property
    def chain(self) -> common_pb2.Chain:
        return self._binding.chain

    @property
    def identity(self) -> SessionIdentity:
        """As which it is open on every hop, or is about to be."""
        return self._binding.identities[0]

    @property
    def open_identity(self) -> SessionIdentity:
        """As which every hop has opened it; of an earlier epoch than `identity` while it is opened anew."""
        return self._binding.open_identities[0]

    @property
    def chain_to_record(self) -> common_pb2.Chain:
        """Where the next turn finds the session, also where a hop has just handed it over."""
        return self._plane.handovers.redirect(self.chain, self._binding.open_identities)

    @property
    def position(self) -> int:
        """Tokens that the whole chain has processed."""
        return len(self._history.token_ids)

    @property
    def max_draft_tokens(self) -> int:
        """How many draft tokens a hop takes in one step."""
        return self._chunk_tokens - 1

    async def restore(self, token_ids: Sequence[int], num_past_tokens: int = 0) -> None:
        """Continues from the tokens that hops hold. Where only some hops hold the past, the others get it again.

        Args:
            token_ids: the text; its last token is left to be processed.
            num_past_tokens: that the session processed earlier.
        """
        states = self._binding.hop_states(0)
        position = min(num_past_tokens, max(state.num_held for state in states))
        if position <= self.num_cached_tokens:
            self._history.append(token_ids[: self.num_cached_tokens], is_prompt=True)
            return
        self._history.append(token_ids[:position], is_prompt=True)
        await self._recovery.fill(self._binding, self, states, self._budget)
        self._microbatcher = self._microbatcher_of(self._binding)

    async def prefill(self, token_ids: Sequence[int], sampler: TokenSampler) -> list[int]:
        """Processes a prompt of at least one token in chunks, several at a time so that all hops work.

        Returns the token that follows, as `sampler` chose it.
        """
        if not token_ids:
            raise InternalError("a prompt to process has at least one token")
        start = self.position
        row, result = await self._with_recovery(lambda: self._send_prompt(token_ids[self.position - start :]))
        (sampled,) = await self._compute.submit(sample_rows, self._edges, [RowOutput(row, result, sampler)])
        if isinstance(sampled, CorollaError):
            raise sampled
        self._newest = sampled
        return sampled.token_ids

    async def fork_from(self, source: "ChainSession", token_ids: Sequence[int], sampler: TokenSampler) -> list[int]:
        """Forks the prompt that `source` processed; on the same chain the hops compute only its last token.

        `source` has processed the prompt and nothing else, and stays so until this returns the token that follows.
        """
        if len(token_ids) == 1 or self.chain != source.chain:
            await self.restore(token_ids)
            return await self.prefill(token_ids[self.position :], sampler)
        self._history.append(token_ids[:-1], is_prompt=True)
        hidden = await self._embed(token_ids[-1], ())
        row = self._row(self.position, 1, 1)
        row.source_session_id = source.identity.session_id
        try:
            sampled = await self._microbatcher.step(row, hidden, sampler)
        except CorollaError as failure:
            # Whatever hops hold by now is the prompt's beginning: they held nothing before.
            await self._recover(failure)
            sampled = await self._with_recovery(lambda: self._step(hidden, sampler))
        self._newest = sampled
        self._history.append(token_ids[-1:], is_prompt=True)
        return sampled.token_ids

    async def decode(self, token_id: int, draft_tokens: Sequence[int], sampler: TokenSampler) -> list[int]:
        """Processes the text's last token, and often draft tokens that follow it, in one step.

        The position moves to the last token that the sampler chose: hops keep draft tokens as far as it chose the same,
        and forget the rest at the next step, which begins there.

        Returns:
            What it chose, at least one token.
        """
        hidden = await self._embed(token_id, draft_tokens)
        sampled = self._newest = await self._with_recovery(lambda: self._step(hidden, sampler))
        self._history.append([token_id, *sampled.token_ids[:-1]], is_prompt=False)
        return sampled.token_ids

    # --- replayed by a recovery -----------------------------------------------------------------------------------

    @property
    def shapes(self) -> StepShapes:
        return self._history.shapes

    async def inputs(self, start: int, end: int) -> torch.Tensor:
        return await self._compute.submit(embed, self._edges, self._history.token_ids[start:end], range(start, end))

    # --- its end --------------------------------------------------------------------------------------------------

    def park(self, position: int, *, earlier: common_pb2.Chain, recorded: common_pb2.Chain) -> None:
        """Ends a turn: the hops keep the first `position` tokens for the next one, as long as they have room.

        Args:
            earlier: the chain of the session's last turn.
            recorded: the chain under which the session will be found again. Nobody would ask other hops later to free
                it, so they free it now.
        """
        session_id, epoch = self.identity.session_id, self.identity.epoch
        self._send_digests(position)
        for hop in recorded.hops:
            self._plane.notify(
                hop.address, pb.Truncate(session_id=session_id, epoch=epoch, position=position, idle=True)
            )
        left = [hop for hop in (*self.chain.hops, *earlier.hops) if hop not in recorded.hops]
        self._plane.close_session(left, self.identity)

    def close(self) -> None:
        """Frees the session's pages on every hop, which may keep what they hold for texts that begin alike."""
        self._send_digests(self.position)
        self._plane.close_session(self._holders(), self.identity)

    def leave_microbatches(self) -> None:
        """No more decode steps come; the microbatch must not wait for them."""
        self._microbatcher.leave(self.identity.session_id)

    def _send_digests(self, num_tokens: int) -> None:
        """Sends every hop the page hashes of the tokens that it holds."""
        identity, text = self.identity, TextDigests(self._history.token_ids[:num_tokens])
        for hop in self._holders():
            page_tokens = self._plane.page_tokens(hop.address)
            if 0 < page_tokens <= num_tokens:
                holds = pb.Holds(session_id=identity.session_id, epoch=identity.epoch, text=text.of(page_tokens))
                self._plane.notify(hop.address, holds)

    def _holders(self) -> list[common_pb2.Hop]:
        return self._plane.handovers.hops_holding(self.chain, self._binding.open_identities[0])

    @property
    def _chunk_tokens(self) -> int:
        return min(self._limits.prefill_chunk_tokens, self._binding.max_step_tokens)

    async def _with_recovery(self, take_step: Callable[[], Awaitable[Result]]) -> Result:
        """Takes a step, again after each failure that a recovery repairs; raises the others."""
        while True:
            try:
                if self._plane.handovers.affect(self.chain, self._binding.open_identities):
                    raise HopLeaving("a hop of the chain handed the session over")
                return await take_step()
            except CorollaError as failure:
                await self._recover(failure)

    async def _recover(self, failure: CorollaError) -> None:
        self.leave_microbatches()
        await self._recovery.recover(self._binding, [self], failure, self._budget)
        self._microbatcher = self._microbatcher_of(self._binding)

    async def _send_prompt(self, token_ids: Sequence[int]) -> tuple[pb.StepRow, RowResult]:
        """Sends all chunks. Returns the last row of the prompt, and what came back for it."""
        under_way: list[tuple[Sequence[int], RowFuture]] = []
        num_hops = len(self.chain.hops)
        try:
            start = 0
            while start < len(token_ids):
                if len(under_way) == MAX_CHUNKS_UNDER_WAY_PER_HOP * num_hops:
                    await self._receive_chunk(*under_way.pop(0))
                # A hop computes a chunk in one piece, and sessions that decode on the chain wait for it.
                is_shared = self._microbatcher.num_sessions > 0
                most = self._limits.prefill_chunk_tokens_during_decode if is_shared else self._chunk_tokens
                size = chunk_tokens(len(token_ids), num_hops, min(most, self._chunk_tokens))
                chunk = token_ids[start : start + size]
                start += len(chunk)
                position = self.position + sum(len(chunk) for chunk, _ in under_way)
                under_way.append((chunk, await self._send_chunk(chunk, position, int(start == len(token_ids)))))
            while len(under_way) > 1:
                await self._receive_chunk(*under_way.pop(0))
            last_chunk, last = under_way.pop()
            result = await self._receive_chunk(last_chunk, last)
        finally:
            discard(future for _, future in under_way)
        return self._row(self.position - len(last_chunk), len(last_chunk), 1), result

    async def _send_chunk(self, token_ids: Sequence[int], position: int, num_result_tokens: int) -> RowFuture:
        positions = range(position, position + len(token_ids))
        hidden = await self._compute.submit(embed, self._edges, token_ids, positions)
        return self._plane.step(self.chain.hops, [self._row(position, len(token_ids), num_result_tokens)], hidden)[0]

    async def _receive_chunk(self, token_ids: Sequence[int], future: RowFuture) -> RowResult:
        result = await wait_for_result(future, self._limits.step_timeout_s)
        self._history.append(token_ids, is_prompt=True)
        return result

    async def _step(self, hidden: torch.Tensor, sampler: TokenSampler) -> SampledTokens:
        return await self._microbatcher.step(self._row(self.position, len(hidden), len(hidden)), hidden, sampler)

    async def _embed(self, token_id: int, draft_tokens: Sequence[int]) -> torch.Tensor:
        newest = self._newest
        is_newest = newest is not None and (newest.token_ids[-1], newest.position) == (token_id, self.position)
        if newest is not None and newest.hidden is not None and is_newest and not draft_tokens:
            return newest.hidden
        token_ids = [token_id, *draft_tokens]
        positions = range(self.position, self.position + len(token_ids))
        if self._edges.is_lookup:
            return embed(self._edges, token_ids, positions)  # the compute thread would cost more
        return await self._compute.submit(embed, self._edges, token_ids, positions)

    def _row(self, position: int, num_tokens: int, num_result_tokens: int) -> pb.StepRow:
        return pb.StepRow(
            session_id=self.identity.session_id,
            epoch=self.identity.epoch,
            position=position,
            num_tokens=num_tokens,
            num_result_tokens=num_result_tokens,
        )


class ChainSessions:
    """Opens sessions, and owns what they share: reservations, recovery and the microbatches of each chain."""

    def __init__(
        self,
        routes: Routes,
        plane: DataPlane,
        edges: Edges,
        compute: ComputeThread,
        limits: ChainLimits,
        on_recovery: Callable[[RecoveryReport], None],
    ) -> None:
        self._reservations = Reservations(routes, plane, limits)
        replayer = Replayer(self._reservations, plane, limits)
        self._recovery = Recovery(routes, self._reservations, replayer, plane.handovers, limits, on_recovery)
        self._plane = plane
        self._edges = edges
        self._compute = compute
        self._limits = limits
        # A chain's microbatch lives as long as a session has it.
        self._microbatchers: WeakValueDictionary[bytes, Microbatcher] = WeakValueDictionary()

    @asynccontextmanager
    async def open(
        self,
        identity: SessionIdentity,
        open_options: OpenOptions,
        on_recovery: Callable[[RecoveryReport], None],
        until_s: float = math.inf,
    ) -> AsyncIterator[ChainSession]:
        """A session on a chain. On leaving, the caller must have closed or parked it.

        Args:
            on_recovery: is called for each recovery of this session.
            until_s: when nobody waits any more, by the event loop's clock.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
        """
        session = ChainSession(
            await self._reservations.reserve([identity], open_options, until_s),
            self._plane,
            self._recovery,
            RecoveryBudget(self._limits.max_recoveries, on_recovery, until_s),
            self._microbatcher_of,
            self._edges,
            self._compute,
            self._limits,
        )
        try:
            yield session
        finally:
            session.leave_microbatches()

    async def free(self, identity: SessionIdentity, chain: common_pb2.Chain) -> None:
        """Frees a session that is open nowhere in this process, as after its deletion."""
        # Where a connection fails, the session's lease will end.
        await asyncio.gather(*(self._plane.connect(hop.address) for hop in chain.hops), return_exceptions=True)
        self._plane.close_session(chain.hops, identity)

    async def close(self) -> None:
        for microbatcher in list(self._microbatchers.values()):
            await microbatcher.close()

    def _microbatcher_of(self, binding: ChainBinding) -> Microbatcher:
        key = binding.chain.SerializeToString(deterministic=True)
        microbatcher = self._microbatchers.get(key)
        if microbatcher is None:
            microbatcher = Microbatcher(
                list(binding.chain.hops), self._plane, self._edges, self._compute,
                max_step_tokens=binding.max_step_tokens, step_timeout_s=self._limits.step_timeout_s,
            )  # fmt: skip
            self._microbatchers[key] = microbatcher
        return microbatcher
