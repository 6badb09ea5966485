"""Steps are replayed only where a check at start finds that right; else a server computes as ever, and says why."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.block_server import graph_choice
from corolla.block_server.decode_graphs import Record
from corolla.block_server.kv.attention import AttentionBatch
from corolla.block_server.kv.decode_buffers import DecodeBuffers
from corolla.block_server.kv.paged_flash import PagedFlash
from corolla.block_server.runner import RowWork, Runner
from tests.checkpoints import make_tiny_checkpoint
from tests.paged_kernel import paged_definition
from tests.recorded_steps import record
from tests.unit.block_server.replaying import PAGE_TOKENS, SPAN, choose, make_runner

# Memory that nobody wrote may hold any numbers, and none.
WRONG = "its results differ by|not finite"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


def assert_refused(caplog: pytest.LogCaptureFixture, runner: Runner, reason: str, how: Record = record) -> None:
    with caplog.at_level(logging.INFO, "corolla.block_server.graph_choice"):
        assert choose(runner, how) is None
    (said,) = (each for each in caplog.records if each.name == graph_choice.__name__)
    assert (said.levelname, said.message) == ("WARNING", "decode steps are not replayed as graphs")
    assert re.search(reason, vars(said)["failure"])
    pool = runner.store.pool
    assert pool.num_available == pool.num_pages, "the check gives its pages back"
    cache = runner.new_cache()
    assert torch.isfinite(runner.run([RowWork(cache, 0, 1)], torch.ones(1, runner.model.hidden_size), SPAN)).all()


def test_what_is_chosen_is_said_and_leaves_no_page_behind(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    runner = make_runner(folder)
    with caplog.at_level(logging.INFO, "corolla.block_server.graph_choice"):
        graphs = choose(runner)
    assert graphs is not None
    assert runner.decode_graphs is graphs
    assert graphs.num_replays == 2 * len({1, 2, 3, 4, 5, 8}), "the check replays the fewest and the most rows of a size"
    (said,) = (each for each in caplog.records if each.name == graph_choice.__name__)
    assert vars(said)["sizes"] == "1 2 4 8"
    assert runner.store.pool.num_available == runner.store.pool.num_pages


def test_a_small_pool_records_no_more_rows_than_it_has_pages_for(folder: Path) -> None:
    runner = make_runner(folder, num_pages=6)
    graphs = choose(runner)
    assert graphs is not None
    caches = [runner.new_cache() for _ in range(5)]
    ones = torch.ones(5, runner.model.hidden_size)
    num_replays = graphs.num_replays
    runner.run([RowWork(cache, 0, 1) for cache in caches[:4]], ones[:4], SPAN)
    assert graphs.num_replays == num_replays + 1
    runner.run([RowWork(cache, cache.num_tokens, 1) for cache in caches], ones, SPAN)
    assert graphs.num_replays == num_replays + 1


@pytest.mark.parametrize("page_tokens", [1, 2, 64])
def test_pages_of_any_size(folder: Path, page_tokens: int) -> None:
    assert choose(make_runner(folder, page_tokens=page_tokens)) is not None


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"is_lean": False}, "the family's own code"),
        ({"attention": "sdpa"}, "attention is sdpa"),
        ({"has_scratch_page": False}, "scratch page"),
        ({"num_pages": 1}, "too few pages"),
    ],
)
def test_what_a_server_lacks_is_named(
    caplog: pytest.LogCaptureFixture, folder: Path, options: dict[str, Any], reason: str
) -> None:
    assert_refused(caplog, make_runner(folder, **options), reason)


def test_a_recording_that_fails_is_done_without(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    def fail(_step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    assert_refused(caplog, make_runner(folder), "CUDA error: operation not permitted when stream is capturing", fail)


class Odd(PagedFlash):
    """Attention that is right when it runs, and wrong when it is replayed, or cannot be recorded.

    Args:
        attend: gets the attention's output and the batch.
    """

    def __init__(self, attend: Callable[[Tensor, AttentionBatch], Tensor]) -> None:
        super().__init__(paged_definition)
        self._odd = attend

    def attend(self, batch: AttentionBatch, *arguments: Any, **options: Any) -> Tensor:
        return self._odd(super().attend(batch, *arguments, **options), batch)


def waits_for_the_device(output: Tensor, _batch: AttentionBatch) -> Tensor:
    return output * float(output.isfinite().all())


def brings_a_tensor_from_python(output: Tensor, _batch: AttentionBatch) -> Tensor:
    return output * torch.tensor([1.0])


@pytest.mark.parametrize("attend", [waits_for_the_device, brings_a_tensor_from_python])
def test_a_step_that_cannot_be_recorded_is_refused(
    caplog: pytest.LogCaptureFixture, folder: Path, attend: Callable[[Tensor, AttentionBatch], Tensor]
) -> None:
    runner = make_runner(folder)
    runner.backend = Odd(attend)
    assert_refused(caplog, runner, "not permitted when a stream is capturing")


def test_a_step_that_depends_on_more_than_its_buffers_is_refused(
    caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    """As Python that looks at the rows would: in a recording it looked once."""
    runner = make_runner(folder)
    runner.backend = Odd(lambda output, batch: output * (1.0 if batch.rows else 0.9))
    assert_refused(caplog, runner, WRONG)


@pytest.mark.parametrize("column", ["positions", "slots", "numbers of keys"])
def test_buffers_that_are_not_written_are_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path, column: str
) -> None:
    padded, row = DecodeBuffers._padded, ["positions", "slots", "numbers of keys"].index(column)

    def stale(buffers: DecodeBuffers, rows: Any) -> list[list[int]]:
        columns = padded(buffers, rows)
        columns[row] = padded(buffers, ())[row]
        return columns

    monkeypatch.setattr(DecodeBuffers, "_padded", stale)
    assert_refused(caplog, make_runner(folder), WRONG)


def test_page_tables_that_are_not_written_are_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    write = DecodeBuffers.write

    def without_pages(buffers: DecodeBuffers, *arguments: Any) -> None:
        write(buffers, *arguments)
        for pages in buffers._pages:
            pages.fill_(0)

    monkeypatch.setattr(DecodeBuffers, "write", without_pages)
    assert_refused(caplog, make_runner(folder), WRONG)


def test_the_check_crosses_the_end_of_a_page(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    seen: set[int] = set()
    write = DecodeBuffers.write

    def watch(buffers: DecodeBuffers, rows: Any, *arguments: Any) -> None:
        seen.update(row.position for row in rows)
        write(buffers, rows, *arguments)

    monkeypatch.setattr(DecodeBuffers, "write", watch)
    assert choose(make_runner(folder)) is not None
    assert {0, PAGE_TOKENS - 1, PAGE_TOKENS} <= seen
