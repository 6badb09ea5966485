"""The loop of a block server: where it computes, and what follows when its device fails."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine, moved
from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import Peer, PeerTable
from corolla.block_server.relay import Relay
from corolla.block_server.scheduler import QueuedStep, Scheduler
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import StepWork
from corolla.cache.store import SessionCache
from corolla.compute.base import LaunchedBatch, RowWork
from corolla.compute.device_memory import DEVICE_MEMORY_USES
from corolla.compute.memory_bound import MemoryBound
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.device_copies import Reading
from corolla.wire.span import Span
from corolla.wire.tensors import to_payload
from tests.checkpoints import make_tiny_checkpoint
from tests.faulty_runner import FaultyRunner
from tests.unread_stream import UnreadStream

SPAN = Span(0, 2)
REQUEST = OpenRequest(
    session_id=b"a", epoch=1, tenant="t", client_id=b"c", resume=True, max_tokens=4, blocks=SPAN, lease_s=10.0,
    transient=False,
)  # fmt: skip


@pytest.fixture
def runner(tmp_path: Path) -> SpanRunner:
    """A runner with two pages in all."""
    model = load_span(
        Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path))), SPAN, dtype=torch.float32
    )
    return SpanRunner(model, num_pages=2, page_tokens=4, max_step_tokens=4, products="library")


async def test_a_device_that_hangs_is_noticed(runner: SpanRunner) -> None:
    sessions: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
    peers, has_given_up, hangs, may_end = PeerTable(), asyncio.Event(), threading.Event(), threading.Event()

    def hang(_rows: object) -> None:
        hangs.set()
        may_end.wait()

    engine = Engine(
        FaultyRunner(runner, before=hang), Scheduler(8, 8), sessions, BoundaryActivations(0), peers,
        partial(Relay, "", peers), BlockServerMetrics(CollectorRegistry()), fail=has_given_up.set,
        most_looks=3,
    )  # fmt: skip
    sessions.open(REQUEST, engine.clock())
    hidden = torch.zeros(1, runner.model.hidden_size)
    step = pb.Step(
        step_id=1, client_id=b"c", rows=[pb.StepRow(session_id=b"a", epoch=1, num_tokens=1, num_result_tokens=1)],
        dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=hidden.shape[1],
    )  # fmt: skip
    running = asyncio.create_task(engine.run())
    engine.look()
    work = StepWork(step, bytes(to_payload(hidden)), Peer(b"c", UnreadStream()))
    engine.submit(QueuedStep(frozenset([b"a"]), {"t": 1}, True, SPAN, work))
    await asyncio.to_thread(hangs.wait)
    for _ in range(4):
        assert not has_given_up.is_set()
        engine.look()
    assert has_given_up.is_set()
    may_end.set()
    running.cancel()
    engine.close()


class Slow(FaultyRunner):
    """Launches steps whose numbers arrive only when a test lets them."""

    def __init__(self, runner: SpanRunner) -> None:
        super().__init__(runner)
        self.has_launched, self.may_arrive = asyncio.Event(), False

    def may_be_recorded(self, *_args: Any) -> bool:
        return True

    def launch(self, rows: Sequence[RowWork], *others: Any) -> LaunchedBatch:
        slow, (hidden, _) = self, others

        class Late(Reading):
            @property
            def has_arrived(self) -> bool:
                return slow.may_arrive

        self.has_launched.set()
        return LaunchedBatch(rows, hidden, Late(), lambda: torch.zeros(()))

    def prepare(self, *_args: Any) -> None:
        pass


async def test_the_event_loop_serves_sockets_while_a_launched_step_runs_and_notices_if_it_hangs(
    runner: SpanRunner,
) -> None:
    sessions: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
    peers, has_given_up, slow = PeerTable(), asyncio.Event(), Slow(runner)
    engine = Engine(
        slow, Scheduler(8, 8), sessions, BoundaryActivations(0), peers, partial(Relay, "", peers),
        BlockServerMetrics(CollectorRegistry()), fail=has_given_up.set,
        most_looks=3, launches_inline=True,
    )  # fmt: skip
    cache = sessions.open(REQUEST, engine.clock()).cache
    running = asyncio.create_task(engine.run())
    has_changed = asyncio.Event()
    for number in range(2):
        hidden = torch.zeros(1, runner.model.hidden_size)
        row = pb.StepRow(session_id=b"a", epoch=1, position=number, num_tokens=1, num_result_tokens=1)
        step = pb.Step(
            step_id=number + 1, client_id=b"c", rows=[row], dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=hidden.shape[1]
        )
        work = StepWork(step, bytes(to_payload(hidden)), Peer(b"c", UnreadStream()))
        engine.submit(QueuedStep(frozenset([b"a"]), {"t": 1}, True, SPAN, work))
        async with asyncio.timeout(30):
            await slow.has_launched.wait()
        slow.has_launched.clear()
        # Two looks at each of two steps are fewer than three at one.
        engine.look()
        engine.look()
        engine.between_iterations(has_changed.set)
        await asyncio.sleep(0.01)
        assert not has_changed.is_set()
        assert not engine.is_idle
        slow.may_arrive = number == 0
        if number == 0:
            async with asyncio.timeout(30):
                await has_changed.wait()
            assert cache.num_tokens == 1
            has_changed.clear()
            slow.may_arrive = False
    assert not has_given_up.is_set()
    engine.look()
    engine.look()
    assert has_given_up.is_set()
    running.cancel()
    engine.close()


async def test_a_broken_device_is_noticed_where_an_idle_session_holds_all_other_pages(runner: SpanRunner) -> None:
    sessions: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
    peers, has_given_up = PeerTable(), asyncio.Event()
    metrics = BlockServerMetrics(CollectorRegistry())
    engine = Engine(
        FaultyRunner(runner, is_broken=True), Scheduler(8, 8), sessions, BoundaryActivations(0), peers,
        partial(Relay, "", peers), metrics, fail=has_given_up.set,
    )  # fmt: skip
    hidden = torch.zeros(4, runner.model.hidden_size)
    runner.forward([RowWork(sessions.open(REQUEST, engine.clock()).cache, 0, 4)], hidden, SPAN)
    sessions.truncate(b"a", 1, 4, idle=True)
    sessions.open(replace(REQUEST, session_id=b"b"), engine.clock())
    assert runner.store.pool.num_available == 0

    row = pb.StepRow(session_id=b"b", epoch=1, num_tokens=1, num_result_tokens=1)
    running = asyncio.create_task(engine.run())
    for number in range(1, 4):
        step = pb.Step(
            step_id=number, client_id=b"c", rows=[row], dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=hidden.shape[1]
        )
        work = StepWork(step, bytes(to_payload(hidden[:1])), Peer(b"c", UnreadStream()))
        engine.submit(QueuedStep(frozenset([b"b"]), {"t": 1}, True, SPAN, work))
    async with asyncio.timeout(30):
        await has_given_up.wait()
    running.cancel()
    engine.close()
    assert [held.request.session_id for held in sessions] == [b"b"]


async def test_the_least_time_of_iterations_counts_what_their_tokens_see(runner: SpanRunner) -> None:
    sessions: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
    peers, registry = PeerTable(), CollectorRegistry()
    metrics = BlockServerMetrics(registry)
    metrics.follow_device(
        lambda: dict.fromkeys(DEVICE_MEMORY_USES, 0), MemoryBound(1e3, len(SPAN), 9000, 500, [(None, 100)])
    )
    engine = Engine(
        runner, Scheduler(8, 8), sessions, BoundaryActivations(0), peers, partial(Relay, "", peers), metrics,
        fail=lambda: None,
    )  # fmt: skip
    held = sessions.open(replace(REQUEST, max_tokens=8), engine.clock())
    running = asyncio.create_task(engine.run())
    for number, (position, num_tokens) in enumerate(((0, 4), (4, 1)), start=1):
        hidden = torch.zeros(num_tokens, runner.model.hidden_size)
        row = pb.StepRow(session_id=b"a", epoch=1, position=position, num_tokens=num_tokens, num_result_tokens=1)
        step = pb.Step(
            step_id=number, client_id=b"c", rows=[row], dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=hidden.shape[1]
        )
        work = StepWork(step, bytes(to_payload(hidden)), Peer(b"c", UnreadStream()))
        engine.submit(QueuedStep(frozenset([b"a"]), {"t": num_tokens}, num_tokens == 1, SPAN, work))
        for _ in range(3000):
            await asyncio.sleep(0.01)
            if held.cache.num_tokens == position + num_tokens and engine.is_idle:
                break
    # The prompt's tokens see 4 tokens, the next one 5.
    for kind, seconds in (("prefill", 9.4), ("decode", 9.5)):
        assert registry.get_sample_value("corolla_hop_memory_bound_seconds_total", {"kind": kind}) == seconds
    running.cancel()
    engine.close()


@pytest.mark.parametrize("copy_s, found", [(0.0, [0, 1, 2, 3, "between"]), (0.002, [0, 1, 2, "between", 3])])
async def test_copies_that_wait_run_together_until_steps_have_waited_long_enough(
    runner: SpanRunner, copy_s: float, found: list[object]
) -> None:
    now_s, done = [0.0], list[object]()
    peers = PeerTable()
    engine = Engine(
        runner, Scheduler(8, 8), SessionTable(runner.store.pool, runner.new_cache), BoundaryActivations(0), peers,
        partial(Relay, "", peers), BlockServerMetrics(CollectorRegistry()), lambda: now_s[0], fail=lambda: None,
    )  # fmt: skip

    def copy(number: int) -> None:
        now_s[0] += copy_s
        done.append(number)

    copies = [asyncio.create_task(engine.copy(partial(copy, number))) for number in range(4)]
    await asyncio.sleep(0)
    engine.between_iterations(lambda: done.append("between"))
    running = asyncio.create_task(engine.run())
    await asyncio.gather(*copies)
    running.cancel()
    engine.close()
    assert done == found


def test_an_average_begins_with_the_first_value() -> None:
    """Planners read it after one step: a tenth of the time would make a fresh server look ten times as fast."""
    assert moved(0.0, 3.0) == 3.0
    assert moved(1.0, 2.0) == pytest.approx(1.1)


@pytest.mark.parametrize("max_inline_s, are_inline", [(3600.0, [False, True, True]), (1e-9, [False] * 3)])
async def test_steps_are_computed_on_the_event_loop_once_one_was_short_enough(
    runner: SpanRunner, max_inline_s: float, are_inline: list[bool]
) -> None:
    sessions: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
    peers, own_thread, found = PeerTable(), threading.current_thread(), list[bool]()
    engine = Engine(
        FaultyRunner(runner, before=lambda _rows: found.append(threading.current_thread() is own_thread)),
        Scheduler(8, 8), sessions, BoundaryActivations(0), peers, partial(Relay, "", peers),
        BlockServerMetrics(CollectorRegistry()), fail=lambda: None, max_inline_s=max_inline_s,
    )  # fmt: skip
    sessions.open(REQUEST, engine.clock())
    hidden = torch.zeros(1, runner.model.hidden_size)
    running = asyncio.create_task(engine.run())
    for position in range(3):
        row = pb.StepRow(session_id=b"a", epoch=1, position=position, num_tokens=1, num_result_tokens=1)
        step = pb.Step(
            step_id=position + 1, client_id=b"c", rows=[row], dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=hidden.shape[1]
        )
        work = StepWork(step, bytes(to_payload(hidden)), Peer(b"c", UnreadStream()))
        engine.submit(QueuedStep(frozenset([b"a"]), {"t": 1}, True, SPAN, work))
        async with asyncio.timeout(30):
            while len(found) <= position or not engine.is_idle:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0)
    assert found == are_inline
    running.cancel()
    engine.close()
