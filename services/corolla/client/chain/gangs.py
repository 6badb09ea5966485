"""Decode steps of sessions on one chain, gathered into gangs that stay together down the chain.

If each hop gathered for itself, sessions would scatter over the hops and batches stay small. So a gang is formed here,
once. Several gangs are under way at a time, one for each hop at most, so that no hop idles.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.chassis.errors import CorollaError, HopUnavailable
from corolla.chassis.lifecycle import TaskGroup
from corolla.client.chain.streams import DataPlane, RowResult
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.tensors import from_payload, tensor_type, to_payload


@dataclass(frozen=True, slots=True)
class _Member:
    row: pb.StepRow
    token_id: int
    logits: asyncio.Future[torch.Tensor]


class Gang:
    """The decoding sessions of one chain.

    Args:
        hops: of the chain.
        step_timeout_s: after it a step counts as lost.
    """

    def __init__(
        self,
        hops: Sequence[common_pb2.Hop],
        plane: DataPlane,
        edges: Edges,
        compute: ComputeThread,
        step_timeout_s: float,
    ) -> None:
        self._hops = hops
        self._plane = plane
        self._edges = edges
        self._compute = compute
        self._step_timeout_s = step_timeout_s
        self._tasks = TaskGroup()
        self._waiting: list[_Member] = []
        self._num_under_way = 0
        # Sessions that decode on this chain now; each has at most one token waiting or under way.
        self._num_sessions = 0

    def join(self) -> None:
        """Counts a session in, from its first decode step on."""
        self._num_sessions += 1

    def leave(self) -> None:
        """Counts it out; those who waited for it go on."""
        self._num_sessions -= 1
        asyncio.get_running_loop().call_soon(self._depart)

    async def decode(self, row: pb.StepRow, token_id: int) -> torch.Tensor:
        """Takes one token of one session through the chain. Returns float32 logits `[V]`.

        Raises:
            CorollaError: what happened to this row; the others of its gang are not concerned.
        """
        member = _Member(row, token_id, asyncio.get_running_loop().create_future())
        self._waiting.append(member)
        # Sessions that become ready in the same turn of the event loop share a gang.
        asyncio.get_running_loop().call_soon(self._depart)
        return await member.logits

    async def close(self) -> None:
        await self._tasks.close()

    def _depart(self) -> None:
        """Sends a gang off when it is full, or when nothing is under way that its members could wait for."""
        self._waiting = [member for member in self._waiting if not member.logits.done()]
        max_under_way = len(self._hops)
        gang_size = -(-max(self._num_sessions, 1) // max_under_way)
        while self._waiting and (
            self._num_under_way == 0 or (self._num_under_way < max_under_way and len(self._waiting) >= gang_size)
        ):
            members, self._waiting = self._waiting[:gang_size], self._waiting[gang_size:]
            self._num_under_way += 1
            self._tasks.start(self._fly(members), "gang")

    async def _fly(self, members: list[_Member]) -> None:
        try:
            await self._step(members)
        except CorollaError as error:
            _fail(members, error)
        finally:
            _fail(members, HopUnavailable("the step was given up"))
            self._num_under_way -= 1
            self._depart()

    async def _step(self, members: list[_Member]) -> None:
        token_ids = [member.token_id for member in members]
        positions = [member.row.position for member in members]
        if self._edges.is_lookup:
            hidden = embed(self._edges, token_ids, positions)  # handing it over would cost more
        else:
            hidden = await self._compute.run(embed, self._edges, token_ids, positions)
        step = pb.Step(
            rows=[member.row for member in members], dtype=tensor_type(hidden.dtype), hidden_size=hidden.shape[1]
        )
        futures = self._plane.step(self._hops, step, to_payload(hidden))
        try:
            await asyncio.wait(futures, timeout=self._step_timeout_s)
        finally:
            for future in futures:
                future.cancel()
        arrived: list[tuple[_Member, RowResult]] = []
        for member, future in zip(members, futures, strict=True):
            if future.cancelled():
                _fail([member], HopUnavailable("a hop of the chain does not answer"))
            elif (failure := future.exception()) is not None:
                _fail([member], failure)
            else:
                arrived.append((member, future.result()))
        if not arrived:
            return
        logits = await self._compute.run(head, self._edges, [result for _, result in arrived])
        for (member, _), row in zip(arrived, logits.unbind(), strict=True):
            if not member.logits.done():
                member.logits.set_result(row)


def embed(edges: Edges, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """`[T, H]` for tokens of any sessions, each at its own position."""
    return edges.embed(torch.tensor(token_ids), torch.tensor(positions))


def head(edges: Edges, results: Sequence[RowResult]) -> torch.Tensor:
    """Float32 logits `[number of result tokens, V]`."""
    rows = [from_payload(result.payload, result.dtype, result.num_tokens, result.hidden_size) for result in results]
    return edges.head(rows[0] if len(rows) == 1 else torch.cat(rows))


def _fail(members: Sequence[_Member], error: BaseException) -> None:
    for member in members:
        if not member.logits.done():
            member.logits.set_exception(error)
