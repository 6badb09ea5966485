"""What a middle hop does with a decode step, in one process and without sockets: what no transport can make faster.

    python -m benchmarks.hop_parts --rows 1 32

A block server's own parts take steps of a ring as bytes, one after the other, compute a single tiny block whose hidden
states are as long as the demo model's, and write the next hop's frames. Nothing else runs and all caches are warm: in a
chain each of these parts takes longer, since other processes had the processor in between.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
import uvloop
from google.protobuf.message import Message

from benchmarks.command import interleaved, run
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
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame, FrameParser, encode
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.frame_bytes import join
from tests.unread_stream import UnreadStream

_SPAN: Final = Span(1, 2)
_FINGERPRINT: Final = "weights"
_CLIENT_ID: Final = b"c" * 16
_FRAME_BYTES: Final = 64 << 20
_MICROSECONDS: Final = 1e6

_STEP: Final = "whole step"
_OPERATORS: Final = "torch's operators of the block"
_FRAMES: Final = "frames read and written"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="sessions of a microbatch")
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=15)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_checkpoint("llama", Path(folder) / "nothing", num_blocks=3, config_changes=TINY_SHAPE)
        checkpoint = Checkpoint.from_pretrained(str(path))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            for num_rows in options.rows:
                hop = loop.run(_Hop.begun(checkpoint, num_rows, options.steps * (options.rounds + 1)))
                sides: dict[str, Callable[[], float]] = {
                    _STEP: partial(_awaited, loop, hop, options.steps),
                    _OPERATORS: partial(hop.operators_us, options.steps),
                    _FRAMES: partial(hop.frames_us, options.steps),
                }
                found = interleaved(sides, options.rounds)
                for name, values in found.items():
                    yield figure(f"{num_rows} rows: {name}", "us", values)
                rest = [step - found[_OPERATORS][at] - found[_FRAMES][at] for at, step in enumerate(found[_STEP])]
                yield figure(f"{num_rows} rows: checks, scheduling, sessions, boundary activations", "us", rest)


def _awaited(loop: asyncio.Runner, hop: "_Hop", num_steps: int) -> float:
    return loop.run(hop.step_us(num_steps))


class _Onward(UnreadStream):
    """The stream to the next hop: tells that a frame was written."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.has_sent = asyncio.Event()

    def send(self, control: Message, payload: Buffer = b"") -> None:
        join([encode(control, payload)])
        self.has_sent.set()


class _Hop:
    """A block server without router, sockets and periodic tasks, whose sessions go round already."""

    def __init__(self, checkpoint: Checkpoint, num_rows: int, num_steps: int) -> None:
        self._runner = SpanRunner(load_span(checkpoint, _SPAN, dtype=torch.float32), num_pages=8192, products="library")
        self._hidden = torch.randn(num_rows, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
        self._session_ids = [number.to_bytes(16, "big") for number in range(1, num_rows + 1)]
        self._num_steps = num_steps
        self._onward = _Onward()
        metrics, peers = BlockServerMetrics(new_registry()), PeerTable()
        scheduler, outputs = Scheduler(4096, 4096), BoundaryActivations(64 << 20)  # type: ignore[var-annotated]
        sessions = SessionTable(self._runner.store.pool, self._runner.new_cache)
        relay = partial(Relay, _FINGERPRINT, peers, connect=lambda *_: self._onward)
        self._engine = Engine(
            self._runner, scheduler, sessions, outputs, peers, relay, metrics,
            fail=lambda: None, max_inline_s=1.0,
        )  # fmt: skip
        identity = Identity(
            server_id="hop", span=_SPAN, model=checkpoint.name, fingerprint=_FINGERPRINT, dtype_name="float32",
            dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=checkpoint.hidden_size, max_tokens_per_frame=4096,
            prefix_page_tokens=0, num_model_blocks=checkpoint.num_blocks, vocab_size=checkpoint.vocab_size,
            context_length=num_steps,
        )  # fmt: skip
        tasks = TaskGroup(lambda: None, TaskMetrics(new_registry()))
        receiver = HandoverReceiver(_SPAN, sessions, self._engine, metrics, tasks, max_part_tokens=4096)
        servicer = BlockServicer(identity, self._engine, sessions, outputs, peers, self._runner.store, receiver, tasks)
        self._from_client, self._from_hop = servicer.accept(_Onward()), servicer.accept(_Onward())
        self._parser = FrameParser(_FRAME_BYTES)
        self._steps = iter([self._step(position) for position in range(num_steps)])
        self._caches = [self._runner.new_cache() for _ in self._session_ids]
        self._position = 0
        self._running: asyncio.Task[None] | None = None

    @classmethod
    async def begun(cls, checkpoint: Checkpoint, num_rows: int, num_steps: int) -> "_Hop":
        """Makes a hop, and opens its sessions."""
        hop = cls(checkpoint, num_rows, num_steps)
        hop._running = asyncio.create_task(hop._engine.run())
        hop._from_client(Frame(pb.Hello(fingerprint=_FINGERPRINT, client_id=_CLIENT_ID), b""))
        hop._from_hop(Frame(pb.Hello(fingerprint=_FINGERPRINT), b""))
        for session_id in hop._session_ids:
            opening = pb.Open(
                session_id=session_id, epoch=1, tenant="t", max_tokens=num_steps, lease_ms=3_600_000,
                blocks=_SPAN.to_message(), keep_activations=True,
            )  # fmt: skip
            hop._from_client(Frame(opening, b""))
        for cache in hop._caches:
            cache.reserve(num_steps)
        await asyncio.sleep(0.1)
        return hop

    async def step_us(self, num_steps: int) -> float:
        """The time from the arrival of a frame's bytes to the sending of the next one's."""
        times_s = []
        for _ in range(num_steps):
            data = next(self._steps)
            self._onward.has_sent.clear()
            began_s = time.thread_time()
            for frame in self._parser.feed(data):
                self._from_hop(frame)
            await self._onward.has_sent.wait()
            times_s.append(time.thread_time() - began_s)
        return _MICROSECONDS * statistics.median(times_s)

    def operators_us(self, num_steps: int) -> float:
        """The same rows, in sessions of their own."""
        times_s = []
        for _ in range(num_steps):
            rows = [RowWork(cache, self._position, 1) for cache in self._caches]
            began_s = time.thread_time()
            self._runner.forward(rows, self._hidden, _SPAN)
            times_s.append(time.thread_time() - began_s)
            self._position += 1
        return _MICROSECONDS * statistics.median(times_s)

    def frames_us(self, num_steps: int) -> float:
        parser, data = FrameParser(_FRAME_BYTES), self._step(0)
        times_s = []
        for _ in range(num_steps):
            began_s = time.thread_time()
            for frame in parser.feed(data):
                join([encode(*frame)])
            times_s.append(time.thread_time() - began_s)
        return _MICROSECONDS * statistics.median(times_s)

    def _step(self, position: int) -> bytes:
        rows: Sequence[pb.StepRow] = [
            pb.StepRow(
                session_id=session_id, epoch=1, position=position, num_tokens=1, num_result_tokens=1,
                client_id=_CLIENT_ID,
            )
            for session_id in self._session_ids
        ]  # fmt: skip
        step = pb.Step(
            rows=rows, blocks=_SPAN.to_message(), samples=True, dtype=pb.TENSOR_TYPE_FLOAT32,
            hidden_size=self._hidden.shape[1], ring=pb.Ring(first_address="first:1", microbatch=position + 1),
        )  # fmt: skip
        step.route.add(address="next:1", span=Span(_SPAN.end, _SPAN.end + 1).to_message())
        return join([encode(step, self._hidden.numpy().tobytes())])


if __name__ == "__main__":
    run(__doc__, add_options, measure)
