"""The double of a GPU sees what is done wrongly there."""

import gc
from typing import Any

import pytest
import torch

from tests.gpu_double import GPU, BrokenRule, a_gpu

# Its annotations are incomplete.
cuda: Any = torch.cuda


def test_a_buffer_that_is_written_again_before_its_copy_has_run_brings_wrong_numbers() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        buffer = torch.ones(3, pin_memory=True)
        copies = []
        for is_awaited in (True, False):
            copies.append(buffer.fill_(1.0).to(GPU, non_blocking=True) * 2)
            if is_awaited:
                torch.cuda.current_stream().synchronize()
            buffer.zero_()
        assert [gpu.numbers(each).tolist() for each in copies] == [[2.0] * 3, [0.0] * 3]


def test_a_buffer_that_is_read_before_its_copy_has_run_has_the_old_numbers() -> None:
    with a_gpu(), torch.inference_mode():
        buffer, event = torch.zeros(3, pin_memory=True), cuda.Event()
        buffer.copy_(torch.ones(3, device=GPU), non_blocking=True)
        event.record()
        assert buffer.tolist() == [0.0] * 3
        event.synchronize()
        assert buffer.tolist() == [1.0] * 3


def test_what_waits_for_the_device_is_noted() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        ones = torch.ones(3, device=GPU)
        pinned = torch.tensor([1.0], pin_memory=True).to(GPU, non_blocking=True)
        assert not gpu.waits
        assert (ones + pinned).tolist() == [2.0] * 3
        torch.tensor([1.0], device=GPU)
        torch.ones(1).to(GPU, non_blocking=True)
        ones.sum().item()
        assert len(gpu.waits) == 4


def test_only_a_tensor_divides_as_on_a_processor() -> None:
    numbers = torch.arange(1.0, 100.0)
    with a_gpu() as gpu, torch.inference_mode():
        on_gpu = numbers.to(GPU)
        divisor = torch.full((), 127.5, device=GPU)
        assert torch.equal(gpu.numbers(on_gpu / divisor), numbers / 127.5)
        assert not torch.equal(gpu.numbers(on_gpu / 127.5), numbers / 127.5)
        assert not torch.equal(gpu.numbers(on_gpu.clone().div_(torch.tensor(127.5))), numbers / 127.5)


def test_streams_that_share_memory_need_an_event_between_them() -> None:
    for is_awaited in (True, False):
        with a_gpu() as gpu, torch.inference_mode():
            ones, side = torch.ones(3, device=GPU), cuda.Stream()
            if is_awaited:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if is_awaited:
                    assert gpu.numbers(ones * 2).tolist() == [2.0] * 3
                else:
                    with pytest.raises(BrokenRule, match="does not wait"):
                        ones * 2


@pytest.mark.parametrize("rule", ["kept", "told", "broken"])
def test_memory_that_goes_back_while_another_stream_uses_it_is_noticed(rule: str) -> None:
    def use() -> None:
        with a_gpu(), torch.inference_mode():
            here, side = torch.cuda.current_stream(), cuda.Stream()
            with torch.cuda.stream(side):
                made = torch.ones(3, device=GPU)
            here.wait_stream(side)
            found = made * 2
            if rule == "told":
                made.record_stream(here)
            if rule != "kept":
                del made
            assert found.tolist() == [2.0] * 3

    if rule == "broken":
        with pytest.raises(BrokenRule, match="memory goes back"):
            use()
    else:
        use()


def test_tensors_of_two_devices_do_not_mix() -> None:
    with a_gpu(), torch.inference_mode():
        ones = torch.ones(3, device=GPU)
        assert (ones * torch.tensor(2.0)).tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="on the CPU"):
            ones * torch.ones(3)


def test_what_a_recording_made_stays_in_it_and_its_pool_ends_with_it() -> None:
    with a_gpu() as gpu, torch.inference_mode():
        ones, pool, side = torch.ones(3, device=GPU), torch.cuda.graph_pool_handle(), cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def recorded() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                made = ones + 1
            return graph, made

        graph, made = recorded()
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(BrokenRule, match="outside of it"):
            made + 1
        del graph, made
        gc.collect()  # frames of what was refused have them, too
        assert gpu.uses[pool] == 0
        with pytest.raises(RuntimeError, match="use_count"):
            recorded()
