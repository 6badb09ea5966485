"""The block server computes a failed batch again row by row, and the failure changes no session's tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from corolla.block_server import batch_executor
from corolla.block_server.batch_executor import BatchExecutor, BatchResult, error_of
from corolla.block_server.hop_session import HopSession, OpenRequest
from corolla.block_server.peers import Peer
from corolla.block_server.row_sampling import ChosenTokens, SessionSampler
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import AdmittedStep, StepWork
from corolla.cache.store import SessionCache
from corolla.cache.tables import Copies
from corolla.chassis.errors import CorollaError, NonFiniteOutput, OutOfMemory, OutOfPages, StepFailed
from corolla.compute import span_runner
from corolla.compute.base import BlockRunner, Embed, LaunchedBatch, RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.decoding.draft_model import DraftModel
from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampler_record import SamplerRecord
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.models.span_model import load_span
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.device_copies import Reading
from corolla.wire.span import Span
from corolla.wire.tensors import to_payload
from tests.checkpoints import make_tiny_checkpoint
from tests.faulty_runner import FaultyRunner
from tests.unread_stream import UnreadStream

SPAN = Span(1, 4)
REQUEST = OpenRequest(
    session_id=b"", epoch=1, tenant="t", client_id=b"c", resume=True, max_tokens=40, blocks=SPAN, lease_s=10.0,
    transient=False,
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "mistral", "bloom"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpanRunner:
    """Rows packed; with a window; and row by row."""
    changes = {"sliding_window": 6} if request.param == "mistral" else {}
    folder = make_tiny_checkpoint(request.param, Path(tmp_path_factory.mktemp("iteration")), config_changes=changes)
    model = load_span(Checkpoint.from_pretrained(str(folder)), SPAN, dtype=torch.float32)
    return SpanRunner(model, page_tokens=4, max_step_tokens=8, products="library")


def compute(runner: BlockRunner, admitted: list[AdmittedStep], blocks: Span) -> BatchResult:
    return BatchExecutor(runner).compute(admitted, blocks)


def assert_close(output: Tensor, expected: Tensor) -> None:
    """Up to the rounding of products, which depends on the rows of a call."""
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


class Sessions:
    """Some sessions, each with a prompt of its own; and the steps that come after."""

    def __init__(self, runner: SpanRunner, names: bytes) -> None:
        self._hidden_size = runner.model.hidden_size
        table: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)
        self.held: dict[int, HopSession[SessionCache]] = {
            name: table.open(replace(REQUEST, session_id=bytes([name])), 0.0) for name in names
        }
        for name in names:
            assert not compute(runner, self.step({name: (0, 5)}), SPAN).has_raised
        # The second one shares all of its pages with the first until one of them goes on.
        fork = table.fork(names[:1], names[1:2], b"c", SPAN)
        table.for_step(names[1:2], 1, b"c", 5, 1, SPAN, 0.0, fork)
        self._table = table

    def close(self) -> None:
        for name in self.held:
            self._table.end(bytes([name]), 1)

    def step(self, rows: dict[int, tuple[int, int]]) -> list[AdmittedStep]:
        """Admits one step; `rows` has position and number of new tokens for each name."""
        message, states = pb.Step(dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=self._hidden_size), []
        admitted = []
        offset = 0
        for name, (position, num_tokens) in rows.items():
            row = message.rows.add(session_id=bytes([name]), position=position, num_tokens=num_tokens)
            admitted.append((row, self.held[name], offset))
            offset += num_tokens
            generator = torch.Generator().manual_seed(100 * name + position)
            states.append(torch.randn(num_tokens, self._hidden_size, generator=generator))
        payload = bytes(to_payload(torch.cat(states)))
        return [AdmittedStep(StepWork(message, payload, Peer(b"c", UnreadStream())), admitted)]


class Spoiling(FaultyRunner):
    """Fails when a row is bad, after it has written other keys and values over those of the new tokens."""

    def __init__(self, runner: SpanRunner, bad: Sequence[SessionCache], failure: Exception) -> None:
        super().__init__(runner)
        self._of_blocks = runner
        self._bad = bad
        self._failure = failure

    def launch(self, rows: Sequence[RowWork], *others: Any) -> LaunchedBatch:
        hidden, blocks = others
        if len(rows) == 1 and not any(row.cache is each for row in rows for each in self._bad):
            return super().launch(rows, hidden, blocks)
        self._of_blocks.forward(rows, -3 * hidden, blocks)
        for row in rows:
            row.cache.truncate(row.position)
        raise self._failure


ROWS = {ord("a"): (5, 1), ord("b"): (5, 3), ord("c"): (5, 2), ord("d"): (3, 2)}
NEXT = {ord("a"): (6, 2), ord("b"): (8, 1), ord("c"): (7, 1), ord("d"): (5, 4)}


@pytest.mark.parametrize(
    "source, is_launched", [(pb.Drafts.SOURCE_PROMPT_LOOKUP, True), (pb.Drafts.SOURCE_DRAFT_MODEL, False)]
)
def test_an_event_loop_launches_no_step_after_which_a_model_drafts(
    runner: SpanRunner, monkeypatch: pytest.MonkeyPatch, source: pb.Drafts.Source.ValueType, is_launched: bool
) -> None:
    # A recorded step fits on GPUs only.
    monkeypatch.setattr(runner, "may_be_recorded", lambda *_: True)
    sessions, executor = Sessions(runner, b"ab"), BatchExecutor(runner)
    record = SamplerRecord(
        SamplingParams(), 0, [1, 2, 3], max_new_tokens=9, drafts=pb.Drafts(source=source, max_tokens=2)
    )
    drafting = DraftModel(cast(Any, None), 64, 64)
    sampler = SessionSampler.read(record.message(), drafting, vocab_size=64, max_tokens=40)
    held = sessions.held[ord("a")]
    held.request = replace(held.request, sampler=sampler)
    launched = executor.launch(sessions.step({ord("a"): (5, 1)}), SPAN)
    assert (launched is not None) == is_launched
    if launched is not None:
        assert executor.finish(launched) is not None
    sessions.close()


@pytest.mark.parametrize("bad", [b"", b"c", b"ad", b"abcd"])
def test_rows_that_fail_alone_leave_nothing_behind(runner: SpanRunner, bad: bytes) -> None:
    names = bytes(ROWS)
    subject, truth = Sessions(runner, names), Sessions(runner, names)
    caches = [subject.held[name].cache for name in bad]
    computed = compute(Spoiling(runner, caches, IndexError("a bug")), subject.step(ROWS), SPAN)
    assert computed.has_raised
    for name, output in zip(names, computed.outputs, strict=True):
        if name in bad:
            assert isinstance(output, StepFailed)
            assert subject.held[name].cache.num_tokens == ROWS[name][0]
            continue
        (expected,) = compute(runner, truth.step({name: ROWS[name]}), SPAN).outputs
        assert isinstance(output, Tensor)
        assert isinstance(expected, Tensor)
        assert_close(output, expected)
    # Those that failed take the same step once more; then all go on.
    for name in bad:
        for sessions in (subject, truth):
            assert not compute(runner, sessions.step({name: ROWS[name]}), SPAN).has_raised
    going_on, expected_on = (compute(runner, sessions.step(NEXT), SPAN) for sessions in (subject, truth))
    for output, expected in zip(going_on.outputs, expected_on.outputs, strict=True):
        assert isinstance(output, Tensor)
        assert isinstance(expected, Tensor)
        assert_close(output, expected)
    for sessions in (subject, truth):
        sessions.close()
    assert runner.store.pool.num_available == runner.store.pool.num_pages


def test_a_page_that_could_not_be_copied_is_not_taken_for_one_that_was(
    runner: SpanRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second session's last page is shared; its own in place of it holds nothing of the tokens before."""
    subject, truth = Sessions(runner, b"ab"), Sessions(runner, b"ab")
    copy_pages, failures = runner.store.copy_pages, [RuntimeError("CUDA error")]

    def fail_once(copies: Copies) -> None:
        if failures:
            raise failures.pop()
        copy_pages(copies)

    with monkeypatch.context() as patch:
        patch.setattr(runner.store, "copy_pages", fail_once)
        (output,) = compute(runner, subject.step({ord("b"): (5, 1)}), SPAN).outputs
    assert isinstance(output, StepFailed)
    (again,) = compute(runner, subject.step({ord("b"): (5, 1)}), SPAN).outputs
    assert isinstance(again, StepFailed), "it has to be filled again first"
    assert subject.held[ord("b")].cache.num_tokens == 4
    (first,), (expected,) = (compute(runner, each.step({ord("a"): (5, 1)}), SPAN).outputs for each in (subject, truth))
    assert isinstance(first, Tensor)
    assert isinstance(expected, Tensor)
    assert_close(first, expected)
    for sessions in (subject, truth):
        sessions.close()


def test_a_non_finite_row_is_not_counted_as_a_device_failure(runner: SpanRunner) -> None:
    sessions = Sessions(runner, b"ab")
    (admitted,) = sessions.step({ord("a"): (5, 1), ord("b"): (5, 1)})
    nothing = torch.full((2, runner.model.hidden_size), torch.nan)
    nothing[0] = 1.0
    spoilt = AdmittedStep(
        StepWork(admitted.work.step, bytes(to_payload(nothing)), Peer(b"c", UnreadStream())), admitted.rows
    )
    computed = compute(runner, [spoilt], SPAN)
    assert not computed.has_raised
    assert [type(output) for output in computed.outputs] == [Tensor, NonFiniteOutput]
    sessions.close()


@pytest.mark.parametrize(
    "failure, kind",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"), OutOfMemory),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory),
        (RuntimeError("CUDA error: device-side assert triggered"), StepFailed),
        (ValueError("not enough memory of what was said"), StepFailed),
        (OutOfPages("too few"), OutOfPages),
    ],
)
def test_a_failure_maps_to_its_error(failure: Exception, kind: type[CorollaError]) -> None:
    error = error_of(failure)
    assert type(error) is kind
    assert isinstance(failure, CorollaError) or not str(failure) or str(failure) not in error.message


def test_a_device_that_failed_ends_the_engine_and_its_first_line_is_logged(
    runner: SpanRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_rows: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nFor debugging consider")

    sessions = Sessions(runner, b"ab")
    with pytest.raises(torch.AcceleratorError):
        compute(FaultyRunner(runner, before=fail), sessions.step({b"a"[0]: (5, 1), b"b"[0]: (5, 1)}), SPAN)
    assert [record.failure for record in caplog.records if hasattr(record, "failure")] == [
        "CUDA error: an illegal memory access was encountered"
    ]
    sessions.close()


def test_memory_that_the_processor_does_not_have_is_recognised() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    assert isinstance(error_of(refused.value), OutOfMemory)


def noted_order(patch: pytest.MonkeyPatch, edges: Edges) -> list[str]:
    """A list that grows when the head is launched, and when it is read whether all rows are finite."""
    events: list[str] = []
    head = edges.head

    def noted_head(hidden: Tensor) -> Tensor:
        events.append("head")
        return head(hidden)

    def noted_finite(number: float) -> bool:
        events.append("finite")
        return math.isfinite(number)

    patch.setattr(edges, "head", noted_head)
    patch.setattr(span_runner, "math", SimpleNamespace(isfinite=noted_finite))
    return events


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tokens_are_the_same_when_the_head_is_launched_early(
    tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head runs before finite rows are known: so devices do it."""
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path)))
    span = Span(2, checkpoint.num_blocks)
    edges = load_edges(checkpoint, dtype=torch.float32, has_embedding=False)
    runner = SpanRunner(load_span(checkpoint, span, dtype=torch.float32), page_tokens=4, max_step_tokens=8)
    names = b"abcd"
    table: SessionTable[SessionCache] = SessionTable(runner.store.pool, runner.new_cache)

    def sessions_of(epoch: int) -> list[HopSession[SessionCache]]:
        held = []
        for index, name in enumerate(names):
            params = SamplingParams(index / 2, top_p=0.9, frequency_penalty=0.1, seed=index)
            record = SamplerRecord(params, index, [1, 2, 3], max_new_tokens=30)
            sampler = SessionSampler.read(
                record.message(), None, vocab_size=checkpoint.vocab_size, max_tokens=REQUEST.max_tokens
            )
            request = replace(REQUEST, session_id=bytes([name, epoch]), blocks=span, sampler=sampler)
            held.append(table.open(request, 0.0))
        return held

    def admitted(held: Sequence[HopSession[SessionCache]], position: int) -> list[AdmittedStep]:
        size = checkpoint.hidden_size
        step = pb.Step(dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=size, samples=True)
        for session in held:
            # A row may want no token, as in the middle of a prompt.
            num_results = 0 if position == 3 else 1
            session_id = session.request.session_id
            step.rows.add(session_id=session_id, position=position, num_tokens=1, num_result_tokens=num_results)
        states = torch.randn(len(held), size, generator=torch.Generator().manual_seed(position))
        if position == spoilt_position:
            states[1] = torch.nan
        work = StepWork(step, bytes(to_payload(states)), Peer(b"c", UnreadStream()))
        return [
            AdmittedStep(work, [(row, each, at) for at, (row, each) in enumerate(zip(step.rows, held, strict=True))])
        ]

    spoilt_position = 7
    events = noted_order(monkeypatch, edges)
    in_turn, early = sessions_of(1), sessions_of(2)
    plain = BatchExecutor(runner, edges)
    executor = BatchExecutor(runner, edges, num_sampling_threads=num_threads, launches_head_early=True)
    executor.warm_up()
    for position in range(8):
        expected = plain.compute(admitted(in_turn, position), span)
        events.clear()
        computed = executor.compute(admitted(early, position), span)
        assert not computed.has_raised
        kinds = [type(output) for output in computed.outputs]
        if position == spoilt_position:
            # The head was launched for all rows, of which those that are finite are used.
            assert events == ["head", "finite"]
            assert kinds == [ChosenTokens, NonFiniteOutput, ChosenTokens, ChosenTokens]
            assert [computed.outputs[row] == expected.outputs[row] for row in (0, 2, 3)] == [True] * 3
            continue
        # No row wants a token at position 3.
        assert events == (["finite"] if position == 3 else ["head", "finite"])
        assert kinds == [ChosenTokens] * len(names)
        assert computed.outputs == expected.outputs
    executor.close()


class OnGpu(torch.Tensor):
    """What a GPU computed: only a copy of it can be sent."""

    device = torch.device("cuda", 0)


class Doubling(SpanRunner):
    """Doubles each number, on a GPU; rows with NaN are not finite."""

    def __init__(self) -> None:
        pass

    def launch(self, rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> LaunchedBatch:
        assert isinstance(hidden, Tensor)
        return LaunchedBatch(rows, (2 * hidden).as_subclass(OnGpu), Reading(), hidden.sum)

    def finish(self, launched: LaunchedBatch, kept: Sequence[int], blocks: Span) -> tuple[bool, ...]:
        parts = torch.split(launched.hidden.as_subclass(torch.Tensor), [row.num_tokens for row in launched.rows])
        return tuple(bool(part.isfinite().all()) for part in parts)


def test_outputs_that_are_sent_leave_a_gpu_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def begin_reading(hidden: Tensor) -> Callable[[], Tensor]:
        assert type(hidden) is OnGpu
        copied.append(len(hidden))
        return lambda: hidden.as_subclass(torch.Tensor).clone()

    monkeypatch.setattr(batch_executor, "begin_reading", begin_reading)
    session = HopSession(replace(REQUEST, session_id=b"s"), cast(SessionCache, None))
    numbers = iter(range(1, 100))

    def step(*lengths: int, goes_on: bool = False, num_results: int = 0, is_finite: bool = True) -> AdmittedStep:
        message = pb.Step(dtype=pb.TENSOR_TYPE_FLOAT32, hidden_size=1)
        if goes_on:
            message.route.add(address="next:1")
        states = torch.tensor([[float(next(numbers))] for _ in range(sum(lengths))])
        if not is_finite:
            states[0] = torch.nan
        rows = [(message.rows.add(num_tokens=length, num_result_tokens=num_results), session, 0) for length in lengths]
        return AdmittedStep(StepWork(message, bytes(to_payload(states)), None), rows)

    steps = [
        step(1, 2, goes_on=True), step(2, num_results=1), step(2, 1, goes_on=True, is_finite=False),
        step(1, 1, num_results=1),
    ]  # fmt: skip
    outputs = compute(Doubling(), steps, SPAN).outputs
    assert copied == [10]
    assert [type(output) for output in outputs] == [Tensor, Tensor, OnGpu, NonFiniteOutput, Tensor, Tensor, Tensor]
    sent = [output.as_subclass(Tensor).flatten().tolist() for output in outputs if isinstance(output, Tensor)]
    assert sent == [[2.0], [4.0, 6.0], [8.0, 10.0], [16.0], [18.0], [20.0]]
