"""The loop of a block server: it takes steps that are ready, computes them, and sends the outputs on.

Session state changes only between iterations, on the event loop; torch runs only within an iteration. Short decode
steps are computed on the event loop itself, or launched there on a device, so that they need no change of threads. All
other work, and the copies of keys and values between iterations, runs in the compute thread.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, TypeVar

from corolla.block_server.batch_executor import BatchExecutor, BatchResult, LaunchedIteration
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.delivery import Delivery, onward_step
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.mtp_drafts import MtpDrafts
from corolla.block_server.peers import PeerTable, StepFaults
from corolla.block_server.relay import Relay
from corolla.block_server.ring.first_hop import FirstHop
from corolla.block_server.ring.last_hop import LastHop
from corolla.block_server.scheduler import QueuedStep, Scheduler
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import AdmittedStep, StepAdmission, StepWork
from corolla.block_server.step_spans import StepSpans
from corolla.cache.store import SessionCache
from corolla.chassis import failpoints
from corolla.chassis.errors import CorollaError, OutOfPages
from corolla.chassis.handlers import call_path
from corolla.compute.base import BlockRunner
from corolla.compute.compute_thread import ComputeThread
from corolla.compute.speed import DecodeSpeed
from corolla.models.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.span import Span

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_FAILURES_IN_A_ROW: Final = 3
_MOST_COPY_S: Final = 0.005
_WEIGHT: Final = 0.1


class Failures:
    """Counts iterations that computed nothing, and ends the process once its device cannot compute any more.

    The server does not hand its sessions over then, since their keys and values lie on the failed device. Their clients
    recover them as after any other death of a server.

    Args:
        fail: ends the process.
    """

    def __init__(self, fail: Callable[[], None]) -> None:
        self._fail = fail
        self._num_in_a_row = 0
        self._current, self._num_looks = 0, 0

    def succeeded(self) -> None:
        """Notes that an iteration gave an output, or that `warm_up` succeeded after an iteration without output."""
        self._num_in_a_row = 0

    def failed(self) -> None:
        """Notes that all rows of an iteration failed and then `warm_up` failed, too, so the rows are not the cause."""
        self._num_in_a_row += 1
        if self._num_in_a_row == _MAX_FAILURES_IN_A_ROW:
            log.critical("every iteration fails, even a test token; ending the process, so that a new one starts")
            self._fail()

    def looked(self, current: int, most_looks: int) -> None:
        """Notes which work the compute thread runs, and ends the process if many looks in a row saw the same work.

        A device that hangs answers no call, and nothing else notices that, because the event loop still answers pings.
        This method counts looks, not seconds, so that a pause of the whole machine does not end a server.

        Args:
            current: see `ComputeThread`.
            most_looks: after how many looks in a row with unchanged work the process ends; 0: never.
        """
        self._num_looks = self._num_looks + 1 if current and current == self._current else 0
        self._current = current
        if most_looks and self._num_looks == most_looks:
            log.critical("the device does not end a step; ending the process, so that a new one starts")
            self._fail()


@dataclass(eq=False, repr=False)
class Engine:
    """Runs the iterations of one block server.

    Args:
        new_relay: makes the relay, which the engine closes, from what takes the rows that come round to this server.
        clock: returns seconds, for leases and the durations of iterations.
        fail: see `Failures`.
        edges: embedding and head, as far as this server has them.
        spans: records spans of steps of traced sessions; None if no spans are collected.
        max_inline_s: decode steps that should take less are computed on the event loop, which serves no sockets
            meanwhile.
        num_sampling_threads, launches_head_early, mtp: see `BatchExecutor`.
        max_microbatches, num_devices: see `FirstHop`.
        compute_thread: a thread that the engine uses and closes; None: the engine makes its own.
        most_looks: see `Failures.looked`.
        launches_inline: whether the event loop launches decode steps on a device, and serves sockets until they are
            computed.

    Attributes:
        first_hop: forms the microbatches of rings that begin here.
        last_hop: ends the steps of rings that end here.
    """

    runner: BlockRunner
    scheduler: Scheduler[StepWork]
    sessions: SessionTable[SessionCache]
    outputs: BoundaryActivations
    peers: PeerTable
    new_relay: Callable[[Callable[[pb.Next], None]], Relay]
    metrics: BlockServerMetrics
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    fail: Callable[[], None]
    edges: Edges | None = None
    spans: StepSpans | None = None
    max_inline_s: float = 0.0
    num_sampling_threads: int = 1
    max_microbatches: int = 0
    num_devices: Callable[[Sequence[str]], int] = len
    compute_thread: ComputeThread | None = None
    most_looks: int = 0
    launches_head_early: bool | None = None
    launches_inline: bool = False
    mtp: MtpDrafts | None = None

    def __post_init__(self) -> None:
        self.failures = Failures(self.fail)
        self._executor = BatchExecutor(
            self.runner, self.edges, self.clock, self.num_sampling_threads, self.launches_head_early, self.mtp
        )
        self._faults = StepFaults(self.peers, self.metrics.faults)
        self.first_hop = FirstHop(
            self.sessions, self._submit_microbatch, self._faults, self.clock,
            max_microbatches=self.max_microbatches, num_devices=self.num_devices,
        )  # fmt: skip
        self._relay = self.new_relay(self.first_hop.on_next)
        self.last_hop = LastHop(self.sessions, self.peers, self._relay)
        self._delivery = Delivery(self.outputs, self.peers, self._relay, self.last_hop, self._faults)
        self._admission = StepAdmission(self.sessions, self.outputs, self._faults, self.clock)
        self._commands: deque[Callable[[], None]] = deque()
        self._copies: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._is_waiting = True
        self._wake = asyncio.Event()
        self._compute_thread = self.compute_thread or ComputeThread()
        # `_launched_number` is the negative number of the iteration that the event loop has launched, or 0.
        self._launched_number, self._num_launched = 0, 0
        self.decode_step_seconds = 0.0
        self.decode_batch_rows = 0.0
        # A row of a larger batch takes less time, so as a bound of a step this is too long rather than too short.
        self._row_seconds = 0.0
        self.decode_speed = DecodeSpeed()

    def submit(self, queued: QueuedStep[StepWork]) -> None:
        """Queues a step. Raises QueueFull."""
        self.scheduler.add(queued)
        self.first_hop.on_tenants(queued.tenant_tokens)
        self._wake.set()

    def _submit_microbatch(self, step: pb.Step) -> None:
        session_ids, tenant_tokens = (
            frozenset(row.session_id for row in step.rows),
            self.sessions.tenant_tokens(step.rows),
        )
        queued = QueuedStep(session_ids, tenant_tokens, True, Span.from_message(step.blocks), StepWork(step, b"", None))
        self.scheduler.add(queued, is_bounded=False)
        self._wake.set()

    def between_iterations(self, command: Callable[[], None]) -> None:
        """Runs `command` while no session is computed. Commands run in the order of the calls, before any later step.

        Args:
            command: a function that changes sessions.
        """
        self._commands.append(command)
        self._wake.set()

    async def copy(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in the compute thread while no session is computed or changed. Raises what `work` raises.

        It is meant for copies of keys and values, which should be short, since steps wait for them. Copies run in the
        order of the calls. Between two iterations run those that wait already, as far as they take no longer than
        `_MOST_COPY_S`.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._copies.append((work, future))
        self._wake.set()
        return await future

    def warm_up(self) -> None:
        """Computes one token that belongs to no session. Must not be called while the engine runs."""
        self._executor.warm_up()

    @property
    def has_more_to_do(self) -> bool:
        """A step, a copy or a command waits; a running command no longer counts."""
        return bool(self._commands or self._copies or len(self.scheduler))

    @property
    def is_idle(self) -> bool:
        """No step, copy or command runs or waits."""
        return self._is_waiting and not self.has_more_to_do

    def resend(self, work: StepWork) -> None:
        """Sends kept boundary activations again, to the first hop of the step's route."""
        step = work.step
        blocks, following = Span.from_message(step.blocks), step.route[0]
        parts: list[bytes] = []
        try:
            for row in step.rows:
                self.sessions.for_step(
                    row.session_id, row.epoch, step.client_id, row.position, row.num_tokens, blocks, self.clock(),
                    computes=False,
                )  # fmt: skip
                parts.append(self.outputs.read(row.session_id, row.position, row.position + row.num_tokens))
        except CorollaError as error:
            self._faults.send(step, error, step.rows, work.sender)
            return
        self.metrics.resent_tokens.inc(sum(row.num_tokens for row in step.rows))
        self._relay.send(following.address, onward_step(step), b"".join(parts))

    def look(self) -> None:
        """Looks whether iterations make progress. Must be called at even intervals; see `Failures.looked`."""
        self.failures.looked(self._compute_thread.current or self._launched_number, self.most_looks)

    async def run(self) -> None:
        """Runs iterations for ever."""
        while True:
            self._is_waiting = True
            await self._wake.wait()
            self._is_waiting = False
            self._wake.clear()
            while True:
                await self._make_copies()
                self._run_commands()
                steps = self.scheduler.next_batch(takes_prompts=not self._executor.is_ahead)
                if not steps and not self._copies:
                    break
                admitted = list(self._admitted(steps))
                if admitted:
                    await self._iterate(steps, admitted)

    def _admitted(self, steps: Sequence[QueuedStep[StepWork]]) -> Iterator[AdmittedStep]:
        for step in steps:
            admitted = self._admission.admit(step)
            if admitted.rows:
                yield admitted
            else:
                self._relay.give_up(step.item.step)

    def close(self) -> None:
        self._relay.close()
        self._compute_thread.close()
        self._executor.close()

    async def _make_copies(self) -> None:
        """Makes the copies that wait, until steps have waited for long enough."""
        until_s = self.clock() + _MOST_COPY_S
        for _ in range(len(self._copies)):
            await self._make_copy()
            if self.clock() >= until_s:
                break

    async def _make_copy(self) -> None:
        """Makes the copy that has waited longest."""
        work, future = self._copies.popleft()
        if future.done():
            return  # its caller was cancelled
        try:
            copied = await self._compute_thread.run(work)
        except Exception as failure:
            if not future.done():
                future.set_exception(failure)
            return
        if not future.done():
            future.set_result(copied)

    def _run_commands(self) -> None:
        if not self._commands:
            return
        while self._commands:
            self._run_command(self._commands.popleft())
        self._run_command(self.first_hop.settle)

    def _run_command(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception as failure:
            # One bad command must not end the loop on which every session depends.
            log.error("command failed", extra={"where": call_path(failure)})

    async def _iterate(self, steps: list[QueuedStep[StepWork]], admitted: list[AdmittedStep]) -> None:
        started_s = self.clock()
        failpoints.passed("before_forward")
        num_seen = _num_seen(admitted)
        is_plain_decode = _is_plain_decode(steps)
        is_inline = is_plain_decode and self._is_short(admitted, len(num_seen))
        launched = None
        if is_plain_decode and self.launches_inline and not any(map(_samples_on_cpu, admitted)):
            launched = self._executor.launch(admitted, steps[0].blocks)
        result = None if launched is None else await self._finished(launched)
        if result is None:
            result = await self._computed(admitted, steps[0].blocks, is_inline=is_inline)
        failpoints.passed("after_forward")
        began_s = result.began_s
        seconds = self.clock() - (started_s if began_s is None else began_s)
        # Outputs leave before the metrics are updated, because other hops wait for them.
        num_undelivered = self._delivery.deliver(admitted, result)
        _tell_of_change(admitted)
        if self.spans is not None:
            self.spans.record(admitted, result.outputs, seconds)
        num_rows = len(result.outputs)
        if result.has_raised and num_rows > 1:
            self.metrics.split_iterations.inc()
        if num_undelivered == num_rows:
            await self._try_out()
            return
        self.failures.succeeded()
        if not result.has_raised:
            self._observe(steps, admitted, num_seen, seconds, result, is_plain_decode=is_plain_decode)
        if launched is not None and not self.has_more_to_do:
            self._executor.prepare_next(launched)
        if is_inline and self.has_more_to_do:
            await asyncio.sleep(0)  # the sockets have their turn; without more to do, the engine waits anyway

    async def _computed(self, admitted: Sequence[AdmittedStep], blocks: Span, *, is_inline: bool) -> BatchResult:
        if is_inline:
            return self._executor.compute(admitted, blocks)
        # Rows that wait for their microbatch come next, and not those whose next step could be launched.
        is_alone = not self.first_hop.num_waiting
        return await self._compute_thread.run(
            self._executor.compute, admitted, blocks, lambda: is_alone and not len(self.scheduler)
        )

    async def _finished(self, launched: LaunchedIteration) -> BatchResult | None:
        """Serves sockets until a device has computed an iteration. Returns None if that failed."""
        self._delivery.prepare(launched.admitted)
        self._num_launched += 1
        self._launched_number = -self._num_launched
        try:
            # A thread that waits for a device does not sleep, either, and to wake another thread takes longer than a
            # turn of the loop.
            while not launched.batch.reading.has_arrived:  # noqa: ASYNC110 - no event of this loop tells what a device does
                await asyncio.sleep(0)
            return self._executor.finish(launched)
        finally:
            self._launched_number = 0

    def _is_short(self, admitted: Sequence[AdmittedStep], num_rows: int) -> bool:
        """Returns True if a plain decode step is probably short enough to be computed on the event loop."""
        seconds = num_rows * self._row_seconds
        return 0.0 < seconds < self.max_inline_s and not any(map(_samples_on_cpu, admitted))

    async def _try_out(self) -> None:
        """Warms up again after an iteration without output, to find out whether the rows were the cause."""
        try:
            # Idle sessions may hold all pages for days; without a free page the loss of the device would go unnoticed.
            self.sessions.make_room(1)
            await self._compute_thread.run(self._executor.warm_up)
        except OutOfPages:
            pass  # the sessions that hold all pages will show whether the server can compute
        except Exception as failure:
            log.error("computing a test token failed, too", extra={"where": call_path(failure)})
            self.failures.failed()
        else:
            self.failures.succeeded()

    def _observe(
        self,
        steps: Sequence[QueuedStep[StepWork]],
        admitted: Sequence[AdmittedStep],
        num_seen: Sequence[int],
        seconds: float,
        result: BatchResult,
        *,
        is_plain_decode: bool,
    ) -> None:
        metrics, num_rows = self.metrics, len(num_seen)
        if is_plain_decode:
            self._row_seconds = moved(self._row_seconds, seconds / num_rows)
            # The planner needs the time of the blocks only: every chain has embedding and head exactly once.
            block_seconds = seconds - result.edge_seconds
            self.decode_step_seconds = moved(self.decode_step_seconds, block_seconds)
            self.decode_batch_rows = moved(self.decode_batch_rows, num_rows)
            if num_rows == 1:
                self.decode_speed.observe(block_seconds, len(steps[0].blocks))
        kind = "decode" if is_plain_decode or all(step.is_decode for step in steps) else "prefill"
        metrics.step_seconds[kind].observe(seconds)
        if (bound := metrics.bound) is not None:
            has_head = any(batch.samples for batch in admitted)
            least_s = bound.seconds(len(steps[0].blocks), num_seen, has_head=has_head)
            metrics.memory_bound_seconds.labels(kind).inc(least_s)
        if result.edge_seconds:
            metrics.edge_seconds.inc(result.edge_seconds)
        metrics.batch_rows.observe(num_rows)
        num_tokens = num_decoded = num_rows
        if not is_plain_decode:
            lengths = [row.num_tokens for batch in admitted for row, _, _ in batch.rows]
            num_tokens, num_decoded = sum(lengths), lengths.count(1)
        metrics.tokens["decode"].inc(num_decoded)
        if num_tokens > num_decoded:
            metrics.tokens["prefill"].inc(num_tokens - num_decoded)


def moved(average: float, value: float) -> float:
    """The average, moved by a tenth towards the new value. An average of 0 becomes the value."""
    return average + (_WEIGHT if average else 1.0) * (value - average)


def _tell_of_change(admitted: Sequence[AdmittedStep]) -> None:
    for batch in admitted:
        for _, session, _ in batch.rows:
            session.on_change()


def _is_plain_decode(steps: Sequence[QueuedStep[StepWork]]) -> bool:
    """Each row of the steps is exactly one next token."""
    return all(step.is_decode and step.num_tokens == len(step.session_ids) for step in steps)


def _num_seen(admitted: Sequence[AdmittedStep]) -> list[int]:
    """The number of tokens that each row sees, including its own."""
    return [row.position + row.num_tokens for batch in admitted for row, _, _ in batch.rows]


def _samples_on_cpu(admitted: AdmittedStep) -> bool:
    """Choosing the tokens needs more than finding the most probable one."""
    samplers = (session.request.sampler for _, session, _ in admitted.rows if admitted.samples)
    return any(sampler is not None and not sampler.takes_likeliest for sampler in samplers)
