"""What surrounds a step on a GPU keeps the rules of streams, copies and captures (`tests.gpu_double`)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corolla.compute import graph_choice
from corolla.compute.span_runner import RowWork
from corolla.models.cuda_capture import CudaCapture, Record
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gpu_double import GPU, a_gpu
from tests.unit.compute.on_gpu import runner_on
from tests.unit.compute.replaying import make_runner

SPAN = Span(1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("rules") / "llama")


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_choice, "SIZES", (1, 2, 4))


def test_recordings_take_one_workspace_for_products_and_none_in_their_pool() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        weight, source, target = (torch.ones(4, 4, device=GPU) for _ in range(3))

        def multiply() -> None:
            target.copy_(source @ weight)

        capture = CudaCapture(GPU)
        replays = [capture(multiply) for _ in range(3)]
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
            CudaCapture(GPU)(lambda: step(tensor))
        assert gpu.stream is caller


def test_steps_on_a_gpu_wait_for_nothing_and_give_the_outputs_of_a_processor(folder: Path) -> None:
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


def test_an_attempt_after_a_lack_of_memory_has_a_pool_of_its_own(folder: Path) -> None:
    """torch refuses a pool whose recordings are gone."""
    attempts: list[int] = []

    def new_record() -> Record:
        capture = CudaCapture(GPU)
        attempts.append(0)

        def record(step: Callable[[], None]) -> Callable[[], None]:
            attempts[-1] += 1
            if attempts == [2]:
                raise torch.AcceleratorError("CUDA error: out of memory")
            return capture(step)

        return record

    with a_gpu() as gpu:
        runner = runner_on(gpu, folder, SPAN)
        graph_choice.choose_graphs(runner, new_record)
        assert runner.decode_graphs is not None
        assert runner.decode_graphs.max_rows == 2
        assert list(gpu.uses.values()) == [0, 2]
