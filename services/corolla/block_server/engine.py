"""The loop: take what is ready, compute it, send it on.

Session state changes only between iterations, on the event loop; torch runs only within one, in a thread of its own.
Copies of keys and values have that thread between iterations.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from corolla.block_server.copies import CopyQueue
from corolla.block_server.failures import Failures
from corolla.block_server.iteration import Admitted, StepWork, packed
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.outputs import OutputStore
from corolla.block_server.peers import PeerTable, step_fault
from corolla.block_server.relay import Relay
from corolla.block_server.runner import BatchOutput, Runner
from corolla.block_server.scheduler import QueuedStep, Scheduler
from corolla.block_server.sessions import SessionTable
from corolla.block_server.speed import DecodeSpeed
from corolla.chassis import failpoints
from corolla.chassis.errors import CorollaError, InternalError, NonFiniteOutput
from corolla.chassis.handlers import where
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.span import Span
from corolla.wire.tensors import tensor_type, to_payload

log = logging.getLogger(__name__)


class Engine:
    """Runs the iterations of one block server.

    Args:
        clock: in seconds; of leases and of the durations of iterations.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler[StepWork],
        sessions: SessionTable[SessionCache],
        outputs: OutputStore,
        peers: PeerTable,
        relay: Relay,
        metrics: BlockServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.failures = Failures()
        self._runner = runner
        self._scheduler = scheduler
        self._sessions = sessions
        self._outputs = outputs
        self._peers = peers
        self._relay = relay
        self._metrics = metrics
        self._commands: list[tuple[Callable[[], None], int | None]] = []
        self._wake = asyncio.Event()
        self._compute_thread = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self.copies = CopyQueue(self._compute_thread, self._wake)
        self.decode_step_seconds = 0.0
        self.decode_speed = DecodeSpeed()

    def submit(self, queued: QueuedStep[StepWork]) -> None:
        """Queues a step. Raises QueueFull."""
        self._scheduler.add(queued)
        self._wake.set()

    def between_iterations(self, command: Callable[[], None], *, max_released_pages: int | None = None) -> None:
        """Runs `command` when no session is being computed; in the order of the calls, before any later step.

        Args:
            command: what changes sessions.
            max_released_pages: how many pages it may give back at most; None where nobody can say.
        """
        self._commands.append((command, max_released_pages))
        self._wake.set()

    @property
    def max_released_pages(self) -> int | None:
        """How many pages the commands that wait may give back; None where nobody can say. An iteration gives none."""
        total = 0
        for _, num_pages in self._commands:
            if num_pages is None:
                return None
            total += num_pages
        return total

    def resend(self, work: StepWork) -> None:
        """Sends kept outputs to the first hop of the step's route, as they were once sent."""
        step = work.step
        blocks, following = Span(step.blocks.start, step.blocks.end), step.route[0]
        parts: list[bytes] = []
        try:
            for row in step.rows:
                self._sessions.for_step(
                    row.session_id, row.epoch, step.client_id, row.position, row.num_tokens, blocks, self.clock(),
                    computes=False,
                )  # fmt: skip
                parts.append(self._outputs.read(row.session_id, row.position, row.position + row.num_tokens))
        except CorollaError as error:
            self._fault(work, error, list(step.rows))
            return
        self._metrics.resent_tokens.inc(sum(row.num_tokens for row in step.rows))
        onward = pb.Step()
        onward.CopyFrom(step)
        onward.blocks.CopyFrom(following.span)
        del onward.route[0]
        self._relay.forward(following.address, onward, b"".join(parts))

    async def run(self) -> None:
        """Iterates for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while True:
                await self.copies.make_next()
                self._run_commands()
                steps = self._scheduler.next_batch()
                if not steps and not self.copies:
                    break
                admitted = [batch for step in steps if (batch := self._admit(step)).rows]
                if not admitted:
                    continue
                blocks = steps[0].blocks
                started_s = self.clock()
                try:
                    failpoints.passed("before_forward")
                    output = await loop.run_in_executor(self._compute_thread, self._compute, admitted, blocks)
                    failpoints.passed("after_forward")
                    seconds = self.clock() - started_s
                    # First what others wait for. It may still be brought here from a device, and that may fail.
                    self._deliver(admitted, output)
                except Exception as failure:
                    log.error("iteration failed", extra={"where": where(failure)})
                    for batch in admitted:
                        failed = NonFiniteOutput("a block server could not compute a step")
                        self._fault(batch.work, failed, [row for row, _, _ in batch.rows])
                    self.failures.failed()
                    continue
                self.failures.succeeded()
                self._observe(steps, admitted, seconds)

    def close(self) -> None:
        self._compute_thread.shutdown(wait=True, cancel_futures=True)

    def _run_commands(self) -> None:
        commands, self._commands = self._commands, []
        for command, _ in commands:
            try:
                command()
            except Exception as failure:
                # One bad command must not end the loop on which every session depends.
                log.error("command failed", extra={"where": where(failure)})

    def _admit(self, queued: QueuedStep[StepWork]) -> Admitted:
        """Checks each row against its session; rows that fail are answered, the others go on."""
        step = queued.item.step
        now_s = self.clock()
        admitted = Admitted(queued.item, [])
        is_scratch = bool(step.scratch_hops & 1)
        forks: dict[bytes, SessionCache | CorollaError] = {}
        # All sources are read before any row changes: rows may swap.
        for row in step.rows:
            if row.source_session_id:
                forks[row.session_id] = self._fork(row, step.client_id, queued.blocks)
        forked_outputs = {row.session_id: self._outputs.copy(row.source_session_id) for row in step.rows if forks}
        offset = 0
        for row in step.rows:
            forked = forks.pop(row.session_id, None)
            try:
                if isinstance(forked, CorollaError):
                    raise forked
                session = self._sessions.for_step(
                    row.scratch_session_id if is_scratch else row.session_id,
                    row.epoch,
                    step.client_id,
                    row.position,
                    row.num_tokens,
                    queued.blocks,
                    now_s,
                    forked,
                )
                admitted.rows.append((row, session, offset))
                if forked is not None:
                    self._outputs.replace(row.session_id, forked_outputs[row.session_id])
            except CorollaError as error:
                if isinstance(forked, SessionCache):
                    forked.clear()
                self._fault(queued.item, error, [row])
            offset += row.num_tokens
        return admitted

    def _fork(self, row: pb.StepRow, client_id: bytes, blocks: Span) -> SessionCache | CorollaError:
        try:
            return self._sessions.fork(row.source_session_id, row.session_id, client_id, blocks)
        except CorollaError as error:
            return error

    def _compute(self, admitted: list[Admitted], blocks: Span) -> BatchOutput:
        """In the compute thread."""
        work, hidden = packed(admitted)
        return self._runner.run_each(work, hidden, blocks)

    def _deliver(self, admitted: list[Admitted], output: BatchOutput) -> None:
        start = row_number = 0
        for batch in admitted:
            parts: list[torch.Tensor] = []
            rows: list[pb.StepRow] = []
            kept: set[bytes] = set()
            bad: list[pb.StepRow] = []
            for row, session, _ in batch.rows:
                end = start + row.num_tokens
                if output.finite[row_number]:
                    rows.append(row)
                    parts.append(output.hidden[start:end])
                    if session.request.keep_outputs:
                        kept.add(row.session_id)
                else:
                    bad.append(row)
                start = end
                row_number += 1
            if bad:
                self._fault(batch.work, NonFiniteOutput("a block's output is not finite"), bad)
            if rows:
                failpoints.passed("before_send")
                self._send_on(batch.work, rows, parts, kept)
                failpoints.passed("after_send")

    def _send_on(self, work: StepWork, rows: list[pb.StepRow], parts: list[torch.Tensor], kept: set[bytes]) -> None:
        step = work.step
        dtype, hidden_size = tensor_type(parts[0].dtype), parts[0].shape[1]
        if step.route or kept:
            payload = _joined(parts)
            self._keep(rows, payload, kept)
        if step.route:
            following = step.route[0]
            onward = pb.Step(
                step_id=step.step_id, client_id=step.client_id, rows=rows, dtype=dtype, hidden_size=hidden_size,
                blocks=following.span, route=step.route[1:], scratch_hops=step.scratch_hops >> 1,
            )  # fmt: skip
            self._relay.forward(following.address, onward, payload)
            return
        peer = self._peers.get(step.client_id)
        if peer is None:
            work.sender.send(step_fault(step, InternalError("the last hop has no stream from the client"), rows))
            return
        result = pb.Result(step_id=step.step_id, rows=rows, dtype=dtype, hidden_size=hidden_size)
        wanted = [part[len(part) - row.num_result_tokens :] for part, row in zip(parts, rows, strict=True)]
        peer.send(result, _joined(wanted))

    def _keep(self, rows: list[pb.StepRow], payload: Buffer, kept: set[bytes]) -> None:
        """Keeps the outputs of the sessions in `kept`; a session that runs in its scratch session is not among them."""
        row_bytes = len(payload) // sum(row.num_tokens for row in rows)
        start = 0
        for row in rows:
            end = start + row.num_tokens * row_bytes
            if row.session_id in kept:
                self._outputs.append(row.session_id, row.position, row.num_tokens, bytes(payload[start:end]))
            start = end

    def _fault(self, work: StepWork, error: CorollaError, rows: list[pb.StepRow]) -> None:
        self._metrics.faults.labels(error.reason).inc(len(rows))
        (self._peers.get(work.step.client_id) or work.sender).send(step_fault(work.step, error, rows))

    def _observe(self, steps: list[QueuedStep[StepWork]], admitted: list[Admitted], seconds: float) -> None:
        is_decode = all(step.is_decode for step in steps)
        kind = "decode" if is_decode else "prefill"
        num_rows = sum(len(batch.rows) for batch in admitted)
        if is_decode and all(step.num_tokens == len(step.session_ids) for step in steps):
            self.decode_step_seconds += 0.1 * (seconds - self.decode_step_seconds)
            if num_rows == 1:
                self.decode_speed.observe(seconds, len(steps[0].blocks))
        self._metrics.step_seconds.labels(kind).observe(seconds)
        self._metrics.batch_rows.observe(num_rows)
        tokens: Counter[str] = Counter()
        for batch in admitted:
            for row, _, _ in batch.rows:
                tokens["decode" if row.num_tokens == 1 else "prefill"] += row.num_tokens
        for kind, num_tokens in tokens.items():
            self._metrics.tokens.labels(kind).inc(num_tokens)


def _joined(parts: list[torch.Tensor]) -> memoryview:
    return to_payload(parts[0] if len(parts) == 1 else torch.cat(parts))
