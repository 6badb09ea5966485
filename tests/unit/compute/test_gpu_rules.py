"""What surrounds a step on a GPU keeps the rules of streams, copies and captures (`tests.gpu_double`)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corolla.compute import graph_choice
from corolla.compute.base import RowWork
from corolla.compute.decode_buffers import DecodeBuffers
from corolla.models.cuda_capture import CudaCapture, Record
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gpu_double import GPU, Gpu, a_gpu
from tests.tiers import quick
from tests.unit.compute.on_gpu import runner_on
from tests.unit.compute.replaying import are_near, make_runner

SPAN = Span(1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("rules") / "llama")


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_choice, "SIZES", (1, 2, 4))
    monkeypatch.setattr(graph_choice, "are_same", are_near)


def test_recordings_take_one_workspace_for_products_and_none_in_their_pool() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        weight, source, target = (torch.ones(4, 4, device=GPU) for _ in range(3))

        def multiply() -> None:
            target.copy_(source @ weight)

        capture = CudaCapture(GPU)
        replays = [capture(multiply, multiply) for _ in range(3)]
        assert len(gpu.workspaces) == 1
        source.fill_(2.0)
        replays[1]()
        assert torch.equal(gpu.numbers(target), torch.full((4, 4), 8.0))


def waits(tensor: Tensor) -> None:
    tensor.sum().item()


def brings_numbers(tensor: Tensor) -> None:
    tensor.add_(torch.tensor([1.0], device=GPU))


@pytest.mark.parametrize("step", [waits, brings_numbers])
def test_a_failed_capture_gives_the_caller_its_stream_back(step: Callable[[Tensor], None]) -> None:
    with a_gpu() as gpu, torch.inference_mode():
        caller, tensor = gpu.stream, torch.ones(4, device=GPU)
        with pytest.raises(torch.AcceleratorError, match="during capture"):
            CudaCapture(GPU)(lambda: step(tensor), lambda: None)
        assert gpu.stream is caller


@pytest.mark.parametrize(
    "family",
    quick(["llama", "qwen3_5_text", "falcon_h1", "deepseek_v3"], "llama", kinds=["qwen3_5_text", "deepseek_v3"]),
)
def test_steps_on_a_gpu_wait_for_nothing_and_give_the_outputs_of_a_processor(
    tmp_path: Path, folder: Path, family: str
) -> None:
    if family != "llama":
        # Kernels alone run experts in a recorded step.
        changes = {"first_k_dense_replace": 9} if family == "deepseek_v3" else {}
        folder = make_tiny_checkpoint(family, tmp_path / family, config_changes=changes)
    plain = make_runner(folder, SPAN)
    with a_gpu() as gpu:
        runner = runner_on(gpu, folder, SPAN)
        graph_choice.choose_graphs(runner, lambda: CudaCapture(GPU))
        assert runner.decode_graphs is not None
        num_checked, both = (
            runner.decode_graphs.num_replays,
            [[each.new_cache() for _ in range(3)] for each in (runner, plain)],
        )
        generator = torch.Generator().manual_seed(0)
        for position, count in ((0, 7), (7, 1), (8, 1), (9, 1)):
            hidden = torch.randn(3 * count, plain.model.hidden_size, generator=generator)
            gpu.waits.clear()
            found, expected = (
                each.forward([RowWork(cache, position, count) for cache in caches], hidden, SPAN)
                for each, caches in zip((runner, plain), both, strict=True)
            )
            assert not gpu.waits
            torch.testing.assert_close(gpu.numbers(found), expected, rtol=1e-4, atol=1e-4)
        assert runner.decode_graphs.num_replays == num_checked + 3


class Launching:
    """Launches the same steps of three sessions on a GPU as a plain runner computes."""

    def __init__(self, gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpu, self._plain, self._runner = gpu, make_runner(folder, SPAN), runner_on(gpu, folder, SPAN)
        graph_choice.choose_graphs(self._runner, lambda: CudaCapture(GPU))
        self._num_written, write_numbers = 0, DecodeBuffers.write_numbers
        self._generator = torch.Generator().manual_seed(0)

        def noted(target: Tensor, numbers: list[list[int]]) -> None:
            self._num_written += 1
            write_numbers(target, numbers)

        monkeypatch.setattr(DecodeBuffers, "write_numbers", staticmethod(noted))
        runners = (self._runner, self._plain)
        self._caches = [[runner.new_cache() for _ in range(3)] for runner in runners]
        prompt = self._draw(3 * 7)
        for runner, caches in zip(runners, self._caches, strict=True):
            for cache in caches:
                cache.reserve(16)
            runner.forward([RowWork(cache, 0, 7) for cache in caches], prompt, SPAN)

    def prepare(self, position: int, *which: int) -> None:
        self._runner.prepare([RowWork(self._caches[0][index], position, 1) for index in which], SPAN)

    def fork(self, source: int, target: int) -> None:
        for caches in self._caches:
            caches[target] = caches[source].fork()
            caches[target].reserve(16)

    def launch(self, position: int, *which: int) -> int:
        """Launches a step of these sessions. Returns how often something but hidden states was written for it."""
        hidden = self._draw(len(which))
        rows, true_rows = ([RowWork(caches[index], position, 1) for index in which] for caches in self._caches)
        self._num_written = 0
        launched = self._runner.launch(rows, hidden, SPAN)
        num_written = self._num_written
        launched.reading.begin()
        assert not launched.reading.has_arrived
        assert launched.reading.has_arrived
        assert self._runner.finish(launched, range(len(rows)), SPAN) == (True,) * len(rows)
        expected = self._plain.forward(true_rows, hidden, SPAN)
        torch.testing.assert_close(self._gpu.numbers(launched.hidden), expected, rtol=1e-4, atol=1e-4)
        return num_written

    def _draw(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self._plain.model.hidden_size, generator=self._generator)


def test_launched_steps_on_a_gpu_wait_for_nothing_and_find_what_was_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps come as prepared, in another order, with fewer rows, one token earlier, or after a session was forked."""
    with a_gpu() as gpu:
        steps = Launching(gpu, folder, monkeypatch)
        gpu.waits.clear()
        assert steps.launch(7, 0, 1, 2)
        steps.prepare(8, 0, 1, 2)
        assert not steps.launch(8, 0, 1, 2)
        steps.prepare(9, 0, 1, 2)
        assert steps.launch(9, 2, 1)
        assert steps.launch(9, 0)
        steps.prepare(10, 0, 1, 2)
        steps.fork(0, 2)
        assert steps.launch(10, 0, 1, 2)
        steps.prepare(11, 0, 1, 2)
        assert steps.launch(10, 0, 1, 2)
        steps.prepare(11, 0, 1, 2)
        assert not steps.launch(11, 0, 1, 2)
        assert not gpu.waits


def test_an_attempt_after_a_lack_of_memory_has_a_pool_of_its_own(folder: Path) -> None:
    """torch refuses a pool whose recordings are gone."""
    attempts: list[int] = []

    def new_record() -> Record:
        capture = CudaCapture(GPU)
        attempts.append(0)

        def record(step: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
            attempts[-1] += 1
            if attempts == [2]:
                raise torch.AcceleratorError("CUDA error: out of memory")
            return capture(step, warm_up)

        return record

    with a_gpu() as gpu:
        runner = runner_on(gpu, folder, SPAN)
        graph_choice.choose_graphs(runner, new_record)
        assert runner.decode_graphs is not None
        assert runner.decode_graphs.max_rows == 2
        assert list(gpu.uses.values()) == [0, 2]
