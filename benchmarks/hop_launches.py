"""What the event loops of two hops do with a token that a device computes, over real sockets and without a device.

    python -m benchmarks.hop_launches --rows 1 8

Two block servers of one process, each with one tiny block, send tokens round. A stand-in for the device computes
nothing and takes `--device-ms` for a step, so the tokens mean nothing. What surrounds a device's step is real: frames
over TCP, checks, scheduling, sessions, buffers of recorded steps, head, samplers. The times are processor time of the
one thread, without the turns in which the loop only looks at the device. A GPU's driver is not among them.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
import uvloop
from google.protobuf.message import Message
from torch import Tensor

from benchmarks.command import run
from benchmarks.figures import Figure, figure
from benchmarks.hops import TINY_SHAPE
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import Identity
from corolla.block_server.handover.receiver import HandoverReceiver
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable
from corolla.block_server.relay import Relay
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.servicer import BlockServicer
from corolla.block_server.sessions import SessionTable
from corolla.chassis.metrics import TaskMetrics, new_registry
from corolla.chassis.tasks import TaskGroup
from corolla.compute.base import BlockRunner, LaunchedBatch
from corolla.compute.decode_buffers import DecodeBuffers
from corolla.compute.decode_graphs import DecodeGraphs
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.span_model import load_span
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.device_copies import Reading
from corolla.wire.frames import Buffer
from corolla.wire.span import Span
from corolla.wire.stream import Accept, FrameStream, Stream, StreamLimits, between_servers, connect, from_callers
from tests.checkpoints import make_tiny_checkpoint

_NUM_HOPS: Final = 2
_FINGERPRINT: Final = "weights"
_CLIENT_ID: Final = b"c" * 16
_MICROSECONDS: Final = 1e6
_HOST: Final = "127.0.0.1"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sessions of a microbatch")
    parser.add_argument("--steps", type=int, default=200, help="tokens of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device-ms", type=float, default=1.0, help="how long the stand-in takes for a step")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_checkpoint("llama", Path(folder) / "nothing", num_blocks=_NUM_HOPS, config_changes=TINY_SHAPE)
        checkpoint = Checkpoint.from_pretrained(str(path))
        for num_rows in options.rows:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
                yield from loop.run(_measured(checkpoint, num_rows, options))


async def _measured(checkpoint: Checkpoint, num_rows: int, options: argparse.Namespace) -> list[Figure]:
    ring = await _Ring.begun(checkpoint, num_rows, options.steps * (options.rounds + 2) + 8, 1e-3 * options.device_ms)
    rounds = [await ring.round(options.steps) for _ in range(options.rounds + 1)][1:]
    ring.end()
    launches, sends, others = zip(*rounds, strict=True)
    return [
        figure(f"{num_rows} rows: from a frame's bytes to its launch", "us", launches),
        figure(f"{num_rows} rows: from the end of a step to the next frame", "us", sends),
        figure(f"{num_rows} rows: all else of a hop", "us", others),
    ]


@dataclass(slots=True)
class _Marks:
    """Moments of the steps under way, as processor time of the thread, and what lay between them."""

    launches_s: list[float] = field(default_factory=list)
    sends_s: list[float] = field(default_factory=list)
    waiting_s: float = 0.0
    last_s: float = 0.0

    def forget(self) -> None:
        self.launches_s.clear()
        self.sends_s.clear()
        self.waiting_s = 0.0

    def begin(self) -> None:
        self.last_s = time.thread_time()

    def since(self) -> float:
        return time.thread_time() - self.last_s


class _Device:
    """Takes a fixed time for each step, and computes nothing."""

    def __init__(self, step_s: float, marks: _Marks) -> None:
        self._step_s = step_s
        self._marks = marks
        self.ends_s = 0.0
        self.num_replays = 0
        self._awaited: tuple[int, asyncio.Event] = 0, asyncio.Event()

    async def after(self, num_replays: int) -> None:
        """Returns once so many more steps are launched."""
        self._awaited = self.num_replays + num_replays, asyncio.Event()
        await self._awaited[1].wait()

    def record(self, *_steps: Callable[[], None]) -> Callable[[], None]:
        return self._replay

    def _replay(self) -> None:
        self._marks.launches_s.append(self._marks.since())
        self.ends_s = max(self.ends_s, time.perf_counter()) + self._step_s
        self.num_replays += 1
        number, is_reached = self._awaited
        if self.num_replays >= number:
            is_reached.set()


class _LateReading(Reading):
    """A reading of a step that the stand-in has not computed yet."""

    def __init__(self, reading: Reading, device: _Device, marks: _Marks) -> None:
        super().__init__()
        self._reading, self._device, self._marks = reading, device, marks
        self._looked_s = 0.0

    def add(self, numbers: Tensor) -> Callable[[], Tensor]:
        return self._reading.add(numbers)

    def begin(self) -> None:
        self._reading.begin()

    @property
    def has_arrived(self) -> bool:
        now_s = time.thread_time()
        marks = self._marks
        if self._looked_s:
            # Between two looks, the loop had one turn in vain.
            marks.waiting_s += now_s - self._looked_s
        has_arrived = time.perf_counter() >= self._device.ends_s
        self._looked_s = time.thread_time()
        if has_arrived:
            marks.begin()
        return has_arrived


class _Unrecorded(DecodeGraphs):
    """Steps without a recording; the stand-in replays them."""

    def _step(self, size: int, layers: Sequence[int], has_adapters: bool = False) -> None:
        pass


class _OnDevice:
    """A runner whose launched steps end when the stand-in says so."""

    def __init__(self, runner: SpanRunner, device: _Device, marks: _Marks) -> None:
        self._runner, self._device, self._marks = runner, device, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, *arguments: Any) -> LaunchedBatch:
        launched = self._runner.launch(*arguments)
        return replace(launched, reading=_LateReading(launched.reading, self._device, self._marks))


class _MarkedStream(FrameStream):
    """A stream that notes when bytes come, and when a frame is written."""

    marks: _Marks | None = None

    def buffer_updated(self, nbytes: int) -> None:
        if self.marks is not None:
            self.marks.begin()
        super().buffer_updated(nbytes)

    def send(self, control: Message, payload: Buffer = b"") -> None:
        super().send(control, payload)
        if self.marks is not None and isinstance(control, pb.Step | pb.Next):
            self.marks.sends_s.append(self.marks.since())


class _Hop:
    """A block server without a router and periodic tasks."""

    def __init__(self, checkpoint: Checkpoint, span: Span, num_rows: int, num_steps: int, step_s: float) -> None:
        self.marks = _Marks()
        device = self.device = _Device(step_s, self.marks)
        runner = SpanRunner(
            load_span(checkpoint, span, dtype=torch.float32), num_pages=num_rows * (num_steps // 32 + 2),
            products="library", has_scratch_page=True,
        )  # fmt: skip
        self._record(runner, device, num_rows)
        metrics, self._peers = BlockServerMetrics(new_registry()), PeerTable()
        outputs = BoundaryActivations(64 << 20)
        sessions = SessionTable(runner.store.pool, runner.new_cache, on_forget=outputs.forget)
        self.engine = Engine(
            cast(BlockRunner, _OnDevice(runner, device, self.marks)), Scheduler(4096, 4096), sessions, outputs,
            self._peers, partial(Relay, _FINGERPRINT, self._peers, connect=self._connect), metrics, fail=lambda: None,
            edges=load_edges(
                checkpoint, dtype=torch.float32, has_embedding=span.start == 0, has_head=span.start > 0
            ),
            launches_inline=True, max_microbatches=1, launches_head_early=True,
        )  # fmt: skip
        identity = Identity(
            server_id="hop", span=span, model=checkpoint.name, fingerprint=_FINGERPRINT, dtype_name="float32",
            dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=checkpoint.hidden_size, max_tokens_per_frame=4096,
            prefix_page_tokens=0, num_model_blocks=checkpoint.num_blocks, vocab_size=checkpoint.vocab_size,
            context_length=num_steps,
        )  # fmt: skip
        tasks = TaskGroup(lambda: None, TaskMetrics(new_registry()))
        receiver = HandoverReceiver(span, sessions, self.engine, metrics, tasks, max_part_tokens=4096)
        self._servicer = BlockServicer(
            identity, self.engine, sessions, outputs, self._peers, runner.store, receiver, tasks
        )
        self.address = ""
        self._server: asyncio.Server | None = None
        self._running: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._stream, _HOST, 0)
        self.address = f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"
        self._running = asyncio.create_task(self.engine.run())

    def end(self) -> None:
        if self._running is not None:
            self._running.cancel()
        if self._server is not None:
            self._server.close()
        self.engine.close()

    def _stream(self) -> FrameStream:
        stream = _MarkedStream(self._servicer.accept, from_callers())
        stream.marks = self.marks
        return stream

    def _connect(self, address: str, accept: Accept, limits: StreamLimits | None = None) -> Stream:
        stream = _MarkedStream(accept, limits or between_servers())
        stream.marks = self.marks
        stream.begin(address)
        return stream

    @staticmethod
    @torch.inference_mode()
    def _record(runner: SpanRunner, device: _Device, num_rows: int) -> None:
        runner.warm_up()
        like = torch.empty(0, runner.model.hidden_size)
        buffers = DecodeBuffers(runner.store, num_rows, runner.store.pool.num_pages * 32, like)
        blocks: Any = SimpleNamespace(span=runner.model.fused, low_rank=None)
        runner.decode_graphs = _Unrecorded(blocks, buffers, runner.backend, device.record, (num_rows,))


class _Ring:
    """Two hops, round which tokens go, and the streams of their client, which drops all frames."""

    def __init__(self, hops: Sequence[_Hop], streams: Sequence[Stream]) -> None:
        self._hops = hops
        self._streams = streams

    @classmethod
    async def begun(cls, checkpoint: Checkpoint, num_rows: int, num_steps: int, step_s: float) -> "_Ring":
        """Makes the hops, opens sessions on them, and lets their rings begin."""
        hops = [_Hop(checkpoint, Span(at, at + 1), num_rows, num_steps, step_s) for at in range(_NUM_HOPS)]
        for hop in hops:
            await hop.begin()
        session_ids = [number.to_bytes(16, "big") for number in range(1, num_rows + 1)]
        streams = [connect(hop.address, lambda _: lambda frame: None) for hop in hops]
        for at, stream in enumerate(streams):
            stream.send(pb.Hello(fingerprint=_FINGERPRINT, client_id=_CLIENT_ID))
            for session_id in session_ids:
                stream.send(_opening(session_id, at, num_steps))
        await asyncio.sleep(0.3)
        for number, session_id in enumerate(session_ids, 1):
            row = pb.StepRow(
                session_id=session_id, epoch=1, position=0, num_tokens=1, num_result_tokens=1, token_ids=[number]
            )
            step = pb.Step(
                step_id=number, client_id=_CLIENT_ID, rows=[row], blocks=Span(0, 1).to_message(), samples=True,
                ring=pb.Ring(first_address=hops[0].address, max_step_tokens=64, credit_end=num_steps),
            )  # fmt: skip
            step.route.add(address=hops[1].address, span=Span(1, 2).to_message())
            streams[0].send(step)
        await asyncio.sleep(0.3)
        return cls(hops, streams)

    async def round(self, num_steps: int) -> tuple[float, float, float]:
        """Lets tokens go round. Returns microseconds of a hop: until a launch, until a frame is sent, and all else."""
        for hop in self._hops:
            hop.marks.forget()
        began_s = time.thread_time()
        await self._hops[-1].device.after(num_steps)
        marks = [hop.marks for hop in self._hops]
        busy_s = (time.thread_time() - began_s - sum(each.waiting_s for each in marks)) / (num_steps * _NUM_HOPS)
        launch_s = statistics.mean(statistics.median(each.launches_s) for each in marks)
        send_s = statistics.mean(statistics.median(each.sends_s) for each in marks)
        return _MICROSECONDS * launch_s, _MICROSECONDS * send_s, _MICROSECONDS * (busy_s - launch_s - send_s)

    def end(self) -> None:
        for stream in self._streams:
            stream.close()
        for hop in self._hops:
            hop.end()


def _opening(session_id: bytes, at: int, num_steps: int) -> pb.Open:
    opening = pb.Open(
        session_id=session_id, epoch=1, tenant="t", max_tokens=num_steps, lease_ms=3_600_000,
        blocks=Span(at, at + 1).to_message(), keep_activations=at == 0,
    )  # fmt: skip
    if at == _NUM_HOPS - 1:
        opening.sampler.parameters.temperature = 0.0
        opening.sampler.num_tokens_left = num_steps
    return opening


if __name__ == "__main__":
    run(__doc__, add_options, measure)
