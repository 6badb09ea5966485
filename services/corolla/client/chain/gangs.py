"""Decode steps of sessions on one chain, gathered into gangs that stay together down the chain.

If each hop gathered for itself, sessions would scatter over the hops and batches stay small. So a gang is formed here,
once. Several gangs are under way at a time, one for each hop at most, so that no hop idles.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.chassis.errors import CorollaError, HopUnavailable, InternalError
from corolla.chassis.lifecycle import TaskGroup
from corolla.client.chain.attendance import Attendance
from corolla.client.chain.awaited import RowFuture
from corolla.client.chain.departure import GangRules
from corolla.client.chain.reading import Arrival, Reader, Reading, read
from corolla.client.chain.streams import DataPlane
from corolla.client.compute import ComputeThread
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.tensors import tensor_type, to_payload


@dataclass(frozen=True, slots=True)
class _Member:
    row: pb.StepRow
    hidden: torch.Tensor
    reader: Reader
    reading: asyncio.Future[Reading]


class Gang:
    """The decoding sessions of one chain.

    Args:
        hops: of the chain.
        max_step_tokens: that every hop takes in one step.
        step_timeout_s: after it a step counts as lost.
    """

    def __init__(
        self,
        hops: Sequence[common_pb2.Hop],
        plane: DataPlane,
        edges: Edges,
        compute: ComputeThread,
        *,
        max_step_tokens: int,
        step_timeout_s: float,
    ) -> None:
        self._hops = hops
        self._plane = plane
        self._edges = edges
        self._compute = compute
        self._rules = GangRules(max_under_way=len(hops), max_tokens=max_step_tokens)
        self._step_timeout_s = step_timeout_s
        self._tasks = TaskGroup()
        self._waiting: list[_Member] = []
        self._num_under_way = 0
        # Each session has at most one step waiting or under way.
        self._attendance = Attendance(round_departures=len(hops))

    @property
    def num_sessions(self) -> int:
        """Sessions that decode on this chain now; those that have paused for long are not counted."""
        return self._attendance.num_sessions

    def leave(self, session_id: bytes) -> None:
        """No more steps of a session come; those who waited for it go on."""
        self._attendance.leave(session_id)
        asyncio.get_running_loop().call_soon(self._depart)

    async def step(self, row: pb.StepRow, hidden: torch.Tensor, reader: Reader) -> Reading:
        """Takes a token of one session, and guesses at those that follow it, through the chain.

        Args:
            row: position and number of tokens; a result is wanted of each.
            hidden: `[T, H]`, the input of block 0 for them.
            reader: chooses what comes next.

        Raises:
            CorollaError: what happened to this row; the others of its gang are not concerned.
        """
        loop = asyncio.get_running_loop()
        member = _Member(row, hidden, reader, loop.create_future())
        self._waiting.append(member)
        self._attendance.come(row.session_id)
        # Sessions that become ready in the same turn of the event loop share a gang: only a complete one leaves now.
        self._depart(may_come=True)
        loop.call_soon(self._depart)
        try:
            return await member.reading
        finally:
            self._attendance.answer(row.session_id)

    async def close(self) -> None:
        await self._tasks.close()

    def _depart(self, *, may_come: bool = False) -> None:
        self._waiting = [member for member in self._waiting if not member.reading.done()]
        while True:
            waiting = [member.row.num_tokens for member in self._waiting]
            num_leaving = self._rules.num_leaving(waiting, self.num_sessions, self._num_under_way, may_come=may_come)
            if not num_leaving:
                return
            members, self._waiting = self._waiting[:num_leaving], self._waiting[num_leaving:]
            self._num_under_way += 1
            self._attendance.depart()
            self._tasks.start(self._finish(members, self._send(members)), "gang")

    def _send(self, members: Sequence[_Member]) -> list[RowFuture]:
        parts = [member.hidden for member in members]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        step = pb.Step(
            rows=[member.row for member in members], dtype=tensor_type(hidden.dtype), hidden_size=hidden.shape[1]
        )
        return self._plane.step(self._hops, step, to_payload(hidden))

    async def _finish(self, members: Sequence[_Member], futures: Sequence[RowFuture]) -> None:
        try:
            await self._read(members, futures)
        finally:
            # No fault of a hop: taking the step again would ask the readers twice.
            _fail(members, InternalError("the step was given up"))
            self._num_under_way -= 1
            self._depart()

    async def _read(self, members: Sequence[_Member], futures: Sequence[RowFuture]) -> None:
        try:
            await asyncio.wait(futures, timeout=self._step_timeout_s)
        finally:
            for future in futures:
                future.cancel()
        arrivals: list[Arrival] = []
        waiting: list[_Member] = []
        for member, future in zip(members, futures, strict=True):
            if future.cancelled():
                _fail([member], HopUnavailable("a hop of the chain does not answer"))
            elif (failure := future.exception()) is not None:
                _fail([member], failure)
            elif not member.reading.done():  # else its session is gone
                arrivals.append(Arrival(member.row, future.result(), member.reader))
                waiting.append(member)
        if not arrivals:
            return
        readings = await self._compute.run(read, self._edges, arrivals)
        for member, reading in zip(waiting, readings, strict=True):
            if isinstance(reading, CorollaError):
                _fail([member], reading)
            elif not member.reading.done():
                member.reading.set_result(reading)


def _fail(members: Sequence[_Member], error: BaseException) -> None:
    for member in members:
        if not member.reading.done():
            member.reading.set_exception(error)
