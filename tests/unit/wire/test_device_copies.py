"""Copies between pinned memory and a GPU that computes something else (`tests.gpu_double`)."""

import pytest
import torch

from corolla.wire.device_copies import Reading, begin_reading, copied_numbers, hand_to_steps, on_copy_stream, to_device
from tests.gpu_double import GPU, BrokenRule, GpuTensor, a_gpu


def test_what_goes_to_a_gpu_is_converted_first_and_then_pinned() -> None:
    hidden = torch.randn(3, 4)
    with a_gpu() as gpu, torch.inference_mode():
        given = hidden.clone()
        copied = to_device(given, GPU, torch.bfloat16)
        # The caller's memory is its own again.
        given.zero_()
        assert not gpu.waits
        assert torch.equal(gpu.numbers(copied), hidden.to(torch.bfloat16))


def test_numbers_of_python_come_by_one_copy_to_places_that_kernels_like() -> None:
    lists = [([1, 2, 3], torch.int64), ([4], torch.int32), ([], torch.int64), ([-5, 6], torch.int32)]
    with a_gpu() as gpu, torch.inference_mode():
        copied = copied_numbers(lists, GPU)
        assert not gpu.waits
        assert len({id(each.cell.memory) for each in copied if isinstance(each, GpuTensor)}) == 1
        for tensor, (numbers, dtype) in zip(copied, lists, strict=True):
            held = gpu.numbers(tensor)
            assert (held.tolist(), held.dtype) == (numbers, dtype)
            assert held.storage_offset() * held.itemsize % 16 == 0
    on_cpu = copied_numbers(lists, torch.device("cpu"))
    assert [(each.tolist(), each.dtype) for each in on_cpu] == lists


def test_what_comes_from_a_gpu_is_there() -> None:
    with a_gpu(), torch.inference_mode():
        computed = torch.ones(3, device=GPU) * 2
        assert to_device(computed, torch.device("cpu"), torch.float32).tolist() == [2.0] * 3


def test_what_stays_on_a_processor_is_not_copied() -> None:
    hidden = torch.randn(3, 4)
    assert to_device(hidden, torch.device("cpu"), torch.float32) is hidden


def test_a_copy_from_a_gpu_is_read_once_the_work_before_it_has_ended() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        computed = torch.ones(3, device=GPU) * 2
        finish = begin_reading(computed)
        later = computed * 2
        assert finish().tolist() == [2.0] * 3
        assert not gpu.waits
        assert not gpu.has_made(later)


def test_one_copy_brings_all_numbers_of_a_reading() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        reading, total = Reading(), torch.full((), 2.5, device=GPU)
        reads = [
            reading.add(total),
            reading.add(torch.tensor([[7, 1 << 40]], pin_memory=True).to(GPU, non_blocking=True)),
        ]
        reading.begin()
        later = total * 2
        assert [read().tolist() for read in reads] == [2.5, [[7.0, float(1 << 40)]]]
        assert (gpu.num_read, gpu.waits, gpu.has_made(later)) == (1, [], False)


def test_the_copy_stream_waits_for_what_was_launched_before_and_for_nothing_later() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        pages = torch.full((3,), 7.0, device=GPU)
        with on_copy_stream(GPU, pages):
            finish = begin_reading(pages)
        later = torch.ones(3, device=GPU)
        # It is given back while the copy may still be under way.
        del pages
        assert finish().tolist() == [7.0] * 3
        assert not gpu.has_made(later)


@pytest.mark.parametrize("is_handed", [True, False])
def test_what_was_made_on_the_copy_stream_is_handed_to_the_steps(is_handed: bool) -> None:
    def use() -> None:
        with a_gpu() as gpu, torch.inference_mode():
            with on_copy_stream(GPU):
                made = torch.ones(3, device=GPU)
                torch.cuda.current_stream().synchronize()
            if is_handed:
                hand_to_steps(made, torch.zeros(1))
            found = made * 2
            del made
            assert gpu.numbers(found).tolist() == [2.0] * 3

    if is_handed:
        use()
    else:
        with pytest.raises(BrokenRule, match="memory goes back"):
            use()


def test_what_reads_nothing_of_the_steps_does_not_wait_for_them() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        step = torch.ones(3, device=GPU)
        with on_copy_stream(GPU):
            begin_reading(torch.zeros(3, device=GPU))()
        assert not gpu.has_made(step)
