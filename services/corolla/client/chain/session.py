"""One session on one chain: the position, and the steps that move it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from corolla.chassis.errors import CorollaError, HopUnavailable, InternalError
from corolla.client.chain.gangs import Gang
from corolla.client.chain.reading import Arrival, Reader, Reading, embed, read
from corolla.client.chain.streams import DataPlane, RowFuture, RowResult
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.tensors import tensor_type, to_payload

MAX_CHUNKS_UNDER_WAY_PER_HOP: Final = 2


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Who a session is on every hop."""

    session_id: bytes
    epoch: int
    tenant: str


class ChainSession:
    """A session that is open on every hop of a chain.

    `position` is the one authoritative count of processed tokens: it moves when a step came back from the last hop, and
    each step carries it.
    """

    def __init__(
        self,
        identity: SessionIdentity,
        chain: common_pb2.Chain,
        position: int,
        plane: DataPlane,
        gang: Gang,
        edges: Edges,
        compute: ComputeThread,
        *,
        prefill_chunk_tokens: int,
        step_timeout_s: float,
    ) -> None:
        self.chain = chain
        self.position = position
        self._identity = identity
        self._plane = plane
        self._gang = gang
        self._edges = edges
        self._compute = compute
        self._chunk_tokens = prefill_chunk_tokens
        self._step_timeout_s = step_timeout_s
        self._in_gang = False
        self._newest: Reading | None = None

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
        under_way: list[tuple[int, RowFuture]] = []
        max_under_way = MAX_CHUNKS_UNDER_WAY_PER_HOP * len(self.chain.hops)
        try:
            for start in range(0, len(token_ids), self._chunk_tokens):
                chunk = token_ids[start : start + self._chunk_tokens]
                is_last = start + len(chunk) == len(token_ids)
                if len(under_way) == max_under_way:
                    await self._arrived(*under_way.pop(0))
                position = self.position + sum(count for count, _ in under_way)
                under_way.append((len(chunk), await self._send_chunk(chunk, position, int(is_last))))
            while len(under_way) > 1:
                await self._arrived(*under_way.pop(0))
            num_last, last = under_way.pop()
            result = await self._arrived(num_last, last)
        finally:
            for _, future in under_way:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # seen: what ended the prompt is on its way
        row = self._row(self.position - num_last, num_last, 1)
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
        if not self._in_gang:
            self._gang.join()
            self._in_gang = True
        hidden = await self._input(token_id, guesses)
        num_tokens = 1 + len(guesses)
        reading = self._newest = await self._gang.step(self._row(self.position, num_tokens, num_tokens), hidden, reader)
        self.position = reading.position
        return reading.token_ids

    def park(self, position: int, *, earlier: common_pb2.Chain, recorded: common_pb2.Chain) -> None:
        """Ends a turn: the hops keep the first `position` tokens for the next one, as long as they have room.

        Args:
            position: tokens to keep.
            earlier: the chain of the session's last turn.
            recorded: the chain under which the session will be found again. Other hops would never be told to free
                it, so they do that now.
        """
        self.position = position
        session_id, epoch = self._identity.session_id, self._identity.epoch
        for hop in recorded.hops:
            self._plane.tell(hop.address, pb.Truncate(session_id=session_id, epoch=epoch, position=position, idle=True))
        for hop in (*self.chain.hops, *earlier.hops):
            if hop not in recorded.hops:
                self._plane.tell(hop.address, pb.Close(session_id=session_id, epoch=epoch))

    def close(self) -> None:
        """Frees the session's pages on every hop."""
        for hop in self.chain.hops:
            self._plane.tell(hop.address, pb.Close(session_id=self._identity.session_id, epoch=self._identity.epoch))

    def leave_gang(self) -> None:
        """No more decode steps come; the gang must not wait for them."""
        if self._in_gang:
            self._gang.leave()
            self._in_gang = False

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

    async def _arrived(self, num_tokens: int, future: RowFuture) -> RowResult:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                result = await future
        except TimeoutError:
            raise HopUnavailable("a hop of the chain does not answer") from None
        self.position += num_tokens
        return result

    def _row(self, position: int, num_tokens: int, num_result_tokens: int) -> pb.StepRow:
        return pb.StepRow(
            session_id=self._identity.session_id,
            epoch=self._identity.epoch,
            position=position,
            num_tokens=num_tokens,
            num_result_tokens=num_result_tokens,
        )
