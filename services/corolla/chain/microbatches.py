"""Decode steps of sessions on one chain, gathered into microbatches that stay together down the chain.

If each hop gathered for itself, sessions would scatter over the hops and batches stay small. So the client service
forms each microbatch once. As many as the chain has hops may be under way, so that no hop idles.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from corolla.chain.microbatch_rules import ActiveSessions, MicrobatchRules
from corolla.chain.pending import RowFuture, sampled_of
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, HopUnavailable, InternalError
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class _PendingStep:
    row: pb.StepRow
    sampled: asyncio.Future[pb.SampledRow]


class Microbatcher:
    """The decoding sessions of one chain."""

    def __init__(
        self,
        hops: Sequence[common_pb2.Hop],
        plane: DataPlane,
        *,
        max_step_tokens: int,
        step_timeout_s: float,
    ) -> None:
        self._hops = hops
        self._plane = plane
        self._rules = MicrobatchRules(max_under_way=len(hops), max_tokens=max_step_tokens)
        self._step_timeout_s = step_timeout_s
        self._tasks = TaskGroup()
        self._waiting: list[_PendingStep] = []
        self._num_under_way = 0
        # Each session has at most one step waiting or under way.
        self._active = ActiveSessions(num_per_round=len(hops))

    @property
    def num_sessions(self) -> int:
        """Sessions that decode on this chain now; those that have paused for long are not counted."""
        return self._active.num_sessions

    def leave(self, session_id: bytes) -> None:
        """No more steps of a session come: microbatches no longer wait for it."""
        self._active.remove(session_id)
        asyncio.get_running_loop().call_soon(self._send_ready)

    async def step(self, row: pb.StepRow) -> pb.SampledRow:
        """Takes a token of one session, and draft tokens that follow it, through the chain.

        Args:
            row: with the tokens' ids; a choice is wanted behind each.

        Raises:
            CorollaError: what happened to this row; the others of its microbatch are not affected.
        """
        loop = asyncio.get_running_loop()
        step = _PendingStep(row, loop.create_future())
        self._waiting.append(step)
        self._active.begin_step(row.session_id)
        # Sessions that become ready in the same turn of the event loop share one: only a complete one leaves now.
        self._send_ready(may_come=True)
        loop.call_soon(self._send_ready)
        try:
            return await step.sampled
        finally:
            self._active.end_step(row.session_id)

    async def close(self) -> None:
        await self._tasks.close()

    def _send_ready(self, *, may_come: bool = False) -> None:
        self._waiting = [step for step in self._waiting if not step.sampled.done()]
        while True:
            waiting = [step.row.num_tokens for step in self._waiting]
            num_leaving = self._rules.num_leaving(waiting, self.num_sessions, self._num_under_way, may_come=may_come)
            if not num_leaving:
                return
            steps, self._waiting = self._waiting[:num_leaving], self._waiting[num_leaving:]
            try:
                futures = self._send(steps)
            except Exception as failure:
                _fail(steps, failure)
                continue
            # Counted only now: what was never sent comes back never, and would keep its place for good.
            self._num_under_way += 1
            self._active.note_sent()
            self._tasks.start(self._finish(steps, futures), "microbatch")

    def _send(self, steps: Sequence[_PendingStep]) -> list[RowFuture]:
        return self._plane.step(self._hops, [step.row for step in steps], samples=True)

    async def _finish(self, steps: Sequence[_PendingStep], futures: Sequence[RowFuture]) -> None:
        try:
            await self._receive(steps, futures)
        finally:
            # No fault of a hop.
            _fail(steps, InternalError("the step was given up"))
            self._num_under_way -= 1
            self._send_ready()

    async def _receive(self, steps: Sequence[_PendingStep], futures: Sequence[RowFuture]) -> None:
        try:
            await asyncio.wait(futures, timeout=self._step_timeout_s)
        finally:
            for future in futures:
                future.cancel()
        for step, future in zip(steps, futures, strict=True):
            if future.cancelled():
                _fail([step], HopUnavailable("a hop of the chain does not answer"))
            elif (failure := future.exception()) is not None:
                _fail([step], failure)
            elif not step.sampled.done():  # else its session is gone
                try:
                    step.sampled.set_result(sampled_of(future.result(), step.row))
                except CorollaError as error:
                    _fail([step], error)


def _fail(steps: Sequence[_PendingStep], error: BaseException) -> None:
    for step in steps:
        if not step.sampled.done():
            step.sampled.set_exception(error)
