"""Steps are replayed only where a check at start finds that right; else a server computes as ever, and says why."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.compute import graph_choice
from corolla.compute.attention.base import AttentionBatch
from corolla.compute.base import RowWork
from corolla.compute.decode_buffers import DecodeBuffers, DecodeStep
from corolla.compute.span_runner import SpanRunner
from corolla.kernels.kernel_trial import are_same
from corolla.models.cuda_capture import Record
from tests.checkpoints import make_tiny_checkpoint
from tests.paged_attention import PagedDefinition
from tests.recorded_steps import record
from tests.unit.compute import replaying
from tests.unit.compute.replaying import PAGE_TOKENS, SIZES, SPAN, choose, make_runner

# Memory that was never written may hold any numbers, NaN included.
WRONG = "its results differ|not finite"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


def assert_refused(caplog: pytest.LogCaptureFixture, runner: SpanRunner, reason: str, how: Record = record) -> None:
    with caplog.at_level(logging.INFO, "corolla.compute.graph_choice"):
        assert choose(runner, how) is None
    (said,) = (each for each in caplog.records if each.name == graph_choice.__name__)
    assert (said.levelname, said.message) == ("WARNING", "not using CUDA graphs for decode steps")
    assert re.search(reason, vars(said)["failure"])
    pool = runner.store.pool
    assert pool.num_available == pool.num_pages, "the check gives its pages back"
    cache = runner.new_cache()
    assert torch.isfinite(runner.forward([RowWork(cache, 0, 1)], torch.ones(1, runner.model.hidden_size), SPAN)).all()


def test_the_choice_of_graphs_is_logged_and_leaves_no_page_behind(
    caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    runner = make_runner(folder)
    with caplog.at_level(logging.INFO, "corolla.compute.graph_choice"):
        graphs = choose(runner)
    assert graphs is not None
    assert runner.decode_graphs is graphs
    assert graphs.num_replays == len([1, 2, 3, 4, 5, 8, 8]), "the check replays the fewest and the most rows of a size"
    (said,) = (each for each in caplog.records if each.name == graph_choice.__name__)
    assert vars(said)["sizes"] == "1 2 4 8"
    assert runner.store.pool.num_available == runner.store.pool.num_pages


def test_a_small_pool_records_no_more_rows_than_it_has_pages_for(folder: Path) -> None:
    runner = make_runner(folder, num_pages=5)
    graphs = choose(runner)
    assert graphs is not None
    caches = [runner.new_cache() for _ in range(5)]
    ones = torch.ones(5, runner.model.hidden_size)
    num_replays = graphs.num_replays
    runner.forward([RowWork(cache, 0, 1) for cache in caches[:4]], ones[:4], SPAN)
    assert graphs.num_replays == num_replays + 1
    runner.forward([RowWork(cache, cache.num_tokens, 1) for cache in caches], ones, SPAN)
    assert graphs.num_replays == num_replays + 1


def test_a_size_is_recorded_if_the_fewest_of_its_rows_have_pages(folder: Path) -> None:
    runner = make_runner(folder, num_pages=7)
    graphs = choose(runner)
    assert graphs is not None
    caches = [runner.new_cache() for _ in range(7)]
    num_replays = graphs.num_replays
    runner.forward([RowWork(cache, 0, 1) for cache in caches], torch.ones(7, runner.model.hidden_size), SPAN)
    assert graphs.num_replays == num_replays + 1, "seven rows run as a step of eight"


@pytest.mark.parametrize("page_tokens", [1, 2, 64])
def test_pages_of_any_size(folder: Path, page_tokens: int) -> None:
    assert choose(make_runner(folder, page_tokens=page_tokens)) is not None


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"has_scratch_page": False}, "scratch page"),
        ({"num_pages": 1}, "too few pages"),
    ],
)
def test_a_missing_condition_for_graphs_is_logged(
    caplog: pytest.LogCaptureFixture, folder: Path, options: dict[str, Any], reason: str
) -> None:
    assert_refused(caplog, make_runner(folder, **options), reason)


@pytest.mark.parametrize("is_fused, name", [(False, "family"), (True, "fused")])
def test_blocks_whose_rows_depend_on_the_step_are_not_recorded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, is_fused: bool, name: str
) -> None:
    monkeypatch.setattr(replaying, "use_modules", lambda _: None)
    assert_refused(caplog, make_runner(folder, is_fused=is_fused), f"the blocks run as {name}, which gives a row other")


def test_steps_are_compared_bit_by_bit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(replaying, "are_near", are_same)
    runner = make_runner(folder)
    runner.backend = Odd(lambda output, batch: output if batch.rows else output * (1 + 2.0**-20))
    assert_refused(caplog, runner, WRONG)


def test_a_server_whose_recording_fails_runs_without_graphs(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    def fail(_step: Callable[[], None], _warm_up: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    assert_refused(caplog, make_runner(folder), "CUDA error: operation not permitted when stream is capturing", fail)


def test_sizes_that_do_not_fit_into_the_memory_are_left_out(folder: Path) -> None:
    num_recorded = 0

    def without_room_for_eight_rows(step: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        nonlocal num_recorded
        step()
        num_recorded += 1
        if num_recorded == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return record(step, warm_up)

    runner = make_runner(folder)
    graphs = choose(runner, without_room_for_eight_rows)
    assert graphs is not None
    assert graphs.max_rows == 4
    assert runner.store.pool.num_available == runner.store.pool.num_pages


class Odd(PagedDefinition):
    """Attention that is right when it runs, and wrong when it is replayed, or cannot be recorded.

    Args:
        attend: gets the attention's output and the batch.
    """

    def __init__(self, attend: Callable[[Tensor, AttentionBatch], Tensor]) -> None:
        self._odd = attend

    def attend(self, batch: AttentionBatch, *arguments: Any, **options: Any) -> Tensor:
        return self._odd(super().attend(batch, *arguments, **options), batch)


def waits_for_the_device(output: Tensor, _batch: AttentionBatch) -> Tensor:
    return output * float(output.isfinite().all())


def brings_a_tensor_from_python(output: Tensor, _batch: AttentionBatch) -> Tensor:
    return output * torch.tensor([1.0])


def makes_a_tensor_on_the_cpu(output: Tensor, _batch: AttentionBatch) -> Tensor:
    return output * torch.ones(1)


@pytest.mark.parametrize("attend", [waits_for_the_device, brings_a_tensor_from_python, makes_a_tensor_on_the_cpu])
def test_a_step_that_cannot_be_recorded_is_refused(
    caplog: pytest.LogCaptureFixture, folder: Path, attend: Callable[[Tensor, AttentionBatch], Tensor]
) -> None:
    runner = make_runner(folder)
    runner.backend = Odd(attend)
    assert_refused(caplog, runner, "not permitted when a stream is capturing")


def test_a_step_whose_tensors_are_kept_is_refused(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    """The next replay would write over them."""
    kept: list[Tensor] = []

    def keep(output: Tensor, _batch: AttentionBatch) -> Tensor:
        kept.append(output * 2)
        return kept[-1] / 2

    runner = make_runner(folder)
    runner.backend = Odd(keep)
    assert_refused(caplog, runner, "is kept")


def test_a_step_that_depends_on_more_than_its_buffers_is_refused(
    caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    """Python that looks at the rows depends on more: in a recording it looked only once."""
    runner = make_runner(folder)
    runner.backend = Odd(lambda output, batch: output * (1.0 if batch.rows else 0.9))
    assert_refused(caplog, runner, WRONG)


@pytest.mark.parametrize("buffer", ["positions", "slots", "numbers of keys", "page tables"])
def test_buffers_that_are_not_written_are_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, buffer: str
) -> None:
    write, num_writes = DecodeBuffers.write, 0

    def write_without(buffers: DecodeBuffers, step: DecodeStep, size: int) -> None:
        nonlocal num_writes
        num_writes += 1
        write(buffers, without(buffer, step), size)
        if buffer == "positions":
            buffers.positions.zero_()

    monkeypatch.setattr(DecodeBuffers, "write", write_without)
    assert_refused(caplog, make_runner(folder), WRONG)
    assert num_writes > 0


def test_tables_of_other_sessions_are_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """The next step may have as many rows of other sessions, or the same ones in another order."""
    write = DecodeBuffers.write
    held: list[Sequence[Any]] = []

    def write_by_number(buffers: DecodeBuffers, step: DecodeStep, size: int) -> None:
        if len(step.tokens) != len(held):
            held[:] = [cache.tables for cache, _ in step.tokens]
        versions = [[tables[group].version for tables in held] for group in range(len(step.versions))]
        write(buffers, replace(step, tokens=[(with_tables(tables), 0) for tables in held], versions=versions), size)

    monkeypatch.setattr(DecodeBuffers, "write", write_by_number)
    assert_refused(caplog, make_runner(folder), WRONG)


def test_a_start_launches_few_steps_kernel_by_kernel(folder: Path) -> None:
    """A GPU takes less time for a step's kernels than Python for launching them."""
    runner, num_attended = make_runner(folder), 0

    def count(output: Tensor, _batch: AttentionBatch) -> Tensor:
        nonlocal num_attended
        num_attended += 1
        return output

    def capture(step: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        warm_up()
        return step

    runner.backend = Odd(count)
    assert choose(runner, capture) is not None
    # Nothing is recorded here, so a replay launches its step. Two ordinary steps are what it is compared with, and one
    # step comes before all recordings. A warm-up has one layer, since all are of one kind.
    num_replays = len([1, 2, 3, 4, 5, 8, 8])
    assert num_attended == len(SPAN) * (num_replays + 2 + 1) + len(SIZES)


def without(buffer: str, step: DecodeStep) -> DecodeStep:
    """The step as it is written; the one buffer has there what padding has, or nothing."""
    if buffer == "page tables":
        blank = [[SimpleNamespace(pages=[0] * len(table.pages)) for table in cache.tables] for cache, _ in step.tokens]
        return replace(step, tokens=[(with_tables(tables), 0) for tables in blank])
    if buffer == "positions":
        return step
    store, columns = step.tokens[0][0].store, list(step.columns)
    assert store.scratch_page is not None
    first, number = {"slots": (1, store.scratch_page * store.pool.page_tokens), "numbers of keys": (2, 1)}[buffer]
    columns[first::2] = [[number] * len(each) for each in columns[first::2]]
    return replace(step, columns=columns)


def with_tables(tables: Sequence[Any]) -> Any:
    return SimpleNamespace(tables=tables)


def test_the_check_crosses_the_end_of_a_page(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    seen: set[int] = set()
    write = DecodeBuffers.write

    def watch(buffers: DecodeBuffers, step: DecodeStep, size: int) -> None:
        seen.update(position for _, position in step.tokens)
        write(buffers, step, size)

    monkeypatch.setattr(DecodeBuffers, "write", watch)
    assert choose(make_runner(folder)) is not None
    assert {0, PAGE_TOKENS - 1, PAGE_TOKENS} <= seen
