"""Several sequences that step through one chain together, each with any number of new tokens."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.chassis.errors import HopUnavailable, InternalError, OutOfPages
from corolla.client.chain.awaited import RowFuture, RowResult
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.replay import MAX_CHUNKS_UNDER_WAY_PER_HOP
from corolla.client.chain.streams import DataPlane
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.tensors import from_payload, tensor_type, to_payload


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one sequence does in a step.

    Attributes:
        row: which sequence.
        position: tokens of it before this step; it forgets what it holds beyond.
        hidden: `[T, H]`, the input of block 0 for its new tokens; T is at least 1.
        num_results: how many of the last new tokens' outputs are wanted.
        source: the sequence whose tokens it takes over first; None keeps its own. All rows of a step do so at once.
    """

    row: int
    position: int
    hidden: torch.Tensor
    num_results: int
    source: int | None = None


class RowGroup:
    """Sequences that are open on every hop of one chain.

    Args:
        identities: of the sequences; row `i` is `identities[i]`.
        max_step_tokens: tokens that a hop takes in one step; longer ones travel in chunks.
        step_timeout_s: after it a step counts as lost.
    """

    def __init__(
        self,
        identities: Sequence[SessionIdentity],
        chain: common_pb2.Chain,
        plane: DataPlane,
        *,
        max_step_tokens: int,
        step_timeout_s: float,
    ) -> None:
        self.identities = tuple(identities)
        self.chain = chain
        self._plane = plane
        self._max_step_tokens = max_step_tokens
        self._step_timeout_s = step_timeout_s

    async def step(self, rows: Sequence[RowStep]) -> list[torch.Tensor]:
        """Takes new tokens of some sequences through the chain.

        Args:
            rows: of different sequences.

        Returns:
            For each of `rows` `[num_results, H]`, the output of the last block before the final norm.

        Raises:
            CorollaError: a row failed, and with it the step; what the others computed is forgotten at their next step.
        """
        if not rows or any(len(row.hidden) == 0 for row in rows):
            raise InternalError("a step has rows, and each row new tokens")
        chunk_tokens = self._max_step_tokens // len(rows)
        if chunk_tokens == 0:
            raise OutOfPages(f"a step takes at most {self._max_step_tokens} sequences")
        results: list[list[RowResult]] = [[] for _ in rows]
        under_way: deque[list[tuple[int, RowFuture]]] = deque()
        longest = max(len(row.hidden) for row in rows)
        try:
            for start in range(0, longest, chunk_tokens):
                if len(under_way) == MAX_CHUNKS_UNDER_WAY_PER_HOP * len(self.chain.hops):
                    await self._collect(under_way[0], results)
                    under_way.popleft()
                under_way.append(self._send(rows, start, chunk_tokens))
            while under_way:
                await self._collect(under_way[0], results)
                under_way.popleft()
        finally:
            for chunk in under_way:
                for _, future in chunk:
                    future.cancel()
        return [_joined(parts, row.hidden) for parts, row in zip(results, rows, strict=True)]

    def close(self) -> None:
        """Frees all sequences on every hop."""
        for hop in self.chain.hops:
            for identity in self.identities:
                self._plane.tell(hop.address, pb.Close(session_id=identity.session_id, epoch=identity.epoch))

    def _send(self, rows: Sequence[RowStep], start: int, chunk_tokens: int) -> list[tuple[int, RowFuture]]:
        """One frame: of each row the new tokens `[start, start + chunk_tokens)`, where there are any."""
        numbers, step_rows, parts = [], [], []
        for number, row in enumerate(rows):
            num_tokens = len(row.hidden)
            end = min(start + chunk_tokens, num_tokens)
            if start >= end:
                continue
            first_result = max(start, num_tokens - row.num_results)
            source = self.identities[row.source].session_id if row.source is not None and start == 0 else b""
            numbers.append(number)
            parts.append(row.hidden[start:end])
            step_rows.append(
                pb.StepRow(
                    session_id=self.identities[row.row].session_id,
                    epoch=self.identities[row.row].epoch,
                    position=row.position + start,
                    num_tokens=end - start,
                    num_result_tokens=max(0, end - first_result),
                    source_session_id=source,
                )
            )
        hidden = torch.cat(parts)
        step = pb.Step(rows=step_rows, dtype=tensor_type(hidden.dtype), hidden_size=hidden.shape[1])
        return list(zip(numbers, self._plane.step(self.chain.hops, step, to_payload(hidden)), strict=True))

    async def _collect(self, chunk: list[tuple[int, RowFuture]], results: list[list[RowResult]]) -> None:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                for number, future in chunk:
                    results[number].append(await future)
        except TimeoutError:
            raise HopUnavailable("a hop of the chain does not answer") from None


def _joined(parts: Sequence[RowResult], like: torch.Tensor) -> torch.Tensor:
    tensors = [from_payload(part.payload, part.dtype, part.num_tokens, part.hidden_size) for part in parts]
    return torch.cat(tensors) if tensors else like.new_empty(0, like.shape[1])
