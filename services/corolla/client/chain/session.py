"""One session on one chain: the position, and the steps that move it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import torch

from corolla.chassis.errors import CorollaError, HopLeaving, InternalError
from corolla.client.chain.account import RecoveryAccount
from corolla.client.chain.awaited import RowFuture, RowResult, arrived, give_up
from corolla.client.chain.chunks import chunk_tokens
from corolla.client.chain.gangs import Gang
from corolla.client.chain.history import StepShapes, TokenHistory
from corolla.client.chain.prefixes import TextDigests
from corolla.client.chain.reading import Arrival, Reader, Reading, embed, read
from corolla.client.chain.recovery import Recovery
from corolla.client.chain.replay import MAX_CHUNKS_UNDER_WAY_PER_HOP, Places
from corolla.client.chain.reservations import Reservation
from corolla.client.chain.streams import DataPlane
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.tensors import tensor_type, to_payload

Answer = TypeVar("Answer")

GangOf = Callable[[Places], Gang]


class ChainSession:
    """A session that is open on every hop of a chain.

    `position` is the one authoritative count of processed tokens: it moves when a step came back from the last hop, and
    each step carries it.

    A step that a hop swallowed is taken again as soon as the session is recovered: on other hops perhaps, but from the
    same position.

    Args:
        reservation: what the hops held of it when it was opened.
        gang_of: the gang of the chain that a session is on.
        max_chunk_tokens: of a prompt's chunks; hops may take less.
        max_chunk_tokens_beside_decode: while others decode on the chain: a hop computes a chunk in one piece, and they
            wait for it.
    """

    def __init__(
        self,
        places: Places,
        reservation: Reservation,
        plane: DataPlane,
        recovery: Recovery,
        account: RecoveryAccount,
        gang_of: GangOf,
        edges: Edges,
        compute: ComputeThread,
        *,
        max_chunk_tokens: int,
        max_chunk_tokens_beside_decode: int,
        step_timeout_s: float,
    ) -> None:
        self._places = places
        self._reservation = reservation
        self._plane = plane
        self._recovery = recovery
        self._account = account
        self._gang_of = gang_of
        self._gang = gang_of(places)
        self._edges = edges
        self._compute = compute
        self._max_chunk_tokens = max_chunk_tokens
        self._max_chunk_tokens_beside_decode = max_chunk_tokens_beside_decode
        self._step_timeout_s = step_timeout_s
        self._history = TokenHistory()
        self._newest: Reading | None = None

    @property
    def chain(self) -> common_pb2.Chain:
        return self._places.chain

    @property
    def resting_chain(self) -> common_pb2.Chain:
        """Where the next turn finds it, also where a hop has handed it over just now."""
        return self._plane.moves.followed(self.chain, self._places.opened)

    @property
    def position(self) -> int:
        """Tokens that the whole chain has processed."""
        return len(self._history.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that all hops held when the session was opened."""
        return self._reservation.num_cached_tokens

    async def take_up(self, token_ids: Sequence[int], num_past_tokens: int = 0) -> None:
        """Goes on from what hops hold of a text. Where only some of them still hold its past, the others get it again.

        Args:
            token_ids: the text; its last token is left to be processed.
            num_past_tokens: that the session processed earlier.
        """
        states = self._reservation.states(0)
        position = min(num_past_tokens, max(state.num_held for state in states))
        if position <= self.num_cached_tokens:
            self._history.append(token_ids[: self.num_cached_tokens], is_prompt=True)
            return
        self._history.append(token_ids[:position], is_prompt=True)
        await self._recovery.fill(self._places, self, states, self._account)
        self._gang = self._gang_of(self._places)

    async def prefill(self, token_ids: Sequence[int], reader: Reader) -> list[int]:
        """Processes a prompt in chunks; several are under way at once, so that hops work at the same time.

        Args:
            token_ids: at least one.
            reader: chooses the token that follows the last one.

        Returns:
            That token.
        """
        if not token_ids:
            raise InternalError("a prompt to process has at least one token")
        start = self.position
        row, result = await self._surely(lambda: self._process(token_ids[self.position - start :]))
        (reading,) = await self._compute.run(read, self._edges, [Arrival(row, result, reader)])
        if isinstance(reading, CorollaError):
            raise reading
        self._newest = reading
        return reading.token_ids

    @property
    def max_guesses(self) -> int:
        """How many guesses a hop takes in one step."""
        return self._chunk_tokens - 1

    async def decode(self, token_id: int, guesses: Sequence[int], reader: Reader) -> list[int]:
        """Processes one token, and guesses at those that follow it, in one step.

        The position moves to the last token that the reader chose: what the hops hold of guesses counts only as far as
        it chose the same. The rest they forget at the next step, which begins there.

        Args:
            token_id: the text's last.
            guesses: at the next ones; often none.
            reader: chooses what follows.

        Returns:
            What it chose, at least one token.
        """
        hidden = await self._input(token_id, guesses)
        reading = self._newest = await self._surely(lambda: self._take_step(hidden, reader))
        self._history.append([token_id, *reading.token_ids[:-1]], is_prompt=False)
        return reading.token_ids

    # --- a member of a recovery -----------------------------------------------------------------------------------

    @property
    def shapes(self) -> StepShapes:
        return self._history.shapes

    async def inputs(self, start: int, end: int) -> torch.Tensor:
        """`[end - start, H]`, what went into the first block."""
        return await self._compute.run(embed, self._edges, self._history.token_ids[start:end], range(start, end))

    # --- its end --------------------------------------------------------------------------------------------------

    def park(self, position: int, *, earlier: common_pb2.Chain, recorded: common_pb2.Chain) -> None:
        """Ends a turn: the hops keep the first `position` tokens for the next one, as long as they have room.

        Args:
            position: tokens to keep.
            earlier: the chain of the session's last turn.
            recorded: the chain under which the session will be found again. Other hops would never be told to free
                it, so they do that now.
        """
        identity = self._places.identities[0]
        session_id, epoch = identity.session_id, identity.epoch
        self._describe(position)
        for hop in recorded.hops:
            self._plane.tell(hop.address, pb.Truncate(session_id=session_id, epoch=epoch, position=position, idle=True))
        for hop in (*self.chain.hops, *earlier.hops):
            if hop not in recorded.hops:
                self._plane.tell(hop.address, pb.Close(session_id=session_id, epoch=epoch))

    def close(self) -> None:
        """Frees the session's pages on every hop, which may keep what they hold for texts that begin alike."""
        self._describe(self.position)
        identity = self._places.identities[0]
        for hop in self._plane.moves.holders(self.chain, self._places.opened[0]):
            self._plane.tell(hop.address, pb.Close(session_id=identity.session_id, epoch=identity.epoch))

    def leave_gang(self) -> None:
        """No more decode steps come; the gang must not wait for them."""
        self._gang.leave(self._places.identities[0].session_id)

    def _describe(self, num_tokens: int) -> None:
        """Tells every hop what it holds."""
        identity, text = self._places.identities[0], TextDigests(self._history.token_ids[:num_tokens])
        for hop in self._plane.moves.holders(self.chain, self._places.opened[0]):
            page_tokens = self._plane.page_tokens(hop.address)
            if 0 < page_tokens <= num_tokens:
                holds = pb.Holds(session_id=identity.session_id, epoch=identity.epoch, text=text.of(page_tokens))
                self._plane.tell(hop.address, holds)

    @property
    def _chunk_tokens(self) -> int:
        return min(self._max_chunk_tokens, self._places.max_step_tokens)

    @property
    def _max_prefill_chunk_tokens(self) -> int:
        most = self._max_chunk_tokens_beside_decode if self._gang.num_sessions else self._max_chunk_tokens
        return min(most, self._chunk_tokens)

    async def _surely(self, step: Callable[[], Awaitable[Answer]]) -> Answer:
        """Takes a step, again after each failure that a recovery mends; raises the others."""
        while True:
            try:
                if self._plane.moves.concern(self.chain, self._places.opened):
                    raise HopLeaving("a hop of the chain handed the session over")
                return await step()
            except CorollaError as failure:
                await self._mend(failure)

    async def _mend(self, failure: CorollaError) -> None:
        self.leave_gang()
        await self._recovery.recover(self._places, [self], failure, self._account)
        self._gang = self._gang_of(self._places)

    async def _process(self, token_ids: Sequence[int]) -> tuple[pb.StepRow, RowResult]:
        """The last row of a prompt, and what came back for it."""
        under_way: list[tuple[Sequence[int], RowFuture]] = []
        max_under_way = MAX_CHUNKS_UNDER_WAY_PER_HOP * len(self.chain.hops)
        try:
            start = 0
            while start < len(token_ids):
                if len(under_way) == max_under_way:
                    await self._arrived(*under_way.pop(0))
                size = chunk_tokens(len(token_ids), len(self.chain.hops), self._max_prefill_chunk_tokens)
                chunk = token_ids[start : start + size]
                start += len(chunk)
                position = self.position + sum(len(chunk) for chunk, _ in under_way)
                under_way.append((chunk, await self._send_chunk(chunk, position, int(start == len(token_ids)))))
            while len(under_way) > 1:
                await self._arrived(*under_way.pop(0))
            last_chunk, last = under_way.pop()
            result = await self._arrived(last_chunk, last)
        finally:
            give_up(future for _, future in under_way)
        return self._row(self.position - len(last_chunk), len(last_chunk), 1), result

    async def _take_step(self, hidden: torch.Tensor, reader: Reader) -> Reading:
        return await self._gang.step(self._row(self.position, len(hidden), len(hidden)), hidden, reader)

    async def _input(self, token_id: int, guesses: Sequence[int]) -> torch.Tensor:
        newest = self._newest
        is_newest = newest is not None and (newest.token_ids[-1], newest.position) == (token_id, self.position)
        if newest is not None and newest.hidden is not None and is_newest and not guesses:
            return newest.hidden
        token_ids = [token_id, *guesses]
        positions = range(self.position, self.position + len(token_ids))
        if self._edges.is_lookup:
            return embed(self._edges, token_ids, positions)  # handing it over would cost more
        return await self._compute.run(embed, self._edges, token_ids, positions)

    async def _send_chunk(self, token_ids: Sequence[int], position: int, num_result_tokens: int) -> RowFuture:
        positions = range(position, position + len(token_ids))
        hidden = await self._compute.run(embed, self._edges, token_ids, positions)
        step = pb.Step(
            rows=[self._row(position, len(token_ids), num_result_tokens)],
            dtype=tensor_type(hidden.dtype),
            hidden_size=hidden.shape[1],
        )
        return self._plane.step(self.chain.hops, step, to_payload(hidden))[0]

    async def _arrived(self, token_ids: Sequence[int], future: RowFuture) -> RowResult:
        result = await arrived(future, self._step_timeout_s)
        self._history.append(token_ids, is_prompt=True)
        return result

    def _row(self, position: int, num_tokens: int, num_result_tokens: int) -> pb.StepRow:
        return pb.StepRow(
            session_id=self._places.identities[0].session_id,
            epoch=self._places.identities[0].epoch,
            position=position,
            num_tokens=num_tokens,
            num_result_tokens=num_result_tokens,
        )
