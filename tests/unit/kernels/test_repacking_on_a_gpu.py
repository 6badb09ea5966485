"""Panels that a GPU makes of a file's bytes have the bits of those that a processor makes (`tests.gpu_double`)."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.repacking import HeldTensor
from corolla.kernels import repacking
from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.repacking import Panels, repack
from corolla.models.gguf.header import TYPES
from corolla.models.merged_experts import MergedPackedExperts
from corolla.models.quantized.description import quantization_of
from corolla.models.quantized.tensors import PackedWeight, packed_weights
from tests.gpu_double import GPU, a_gpu
from tests.quantized_checkpoints import FORMATS, Made, awq, compressed_tensors, fp8_of_outputs, gptq

MADE: dict[str, Callable[[], Made]] = {
    "awq": awq,
    "gptq": lambda: gptq(4, 64),
    "gptq with activation order": lambda: gptq(4, 64, is_ordered=True),
    "gptq of 8 bits": lambda: gptq(8, 64),
    "w4a16": lambda: compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=64),
    "w4a16 with zero points": lambda: compressed_tensors(
        "pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False
    ),
    "w8a16": FORMATS["w8a16"],
    "fp8 of blocks": FORMATS["fp8-blocks"],
    "fp8 of outputs": lambda: fp8_of_outputs(kind=torch.float8_e5m2),
}


def weight_of(name: str) -> PackedWeight:
    made = MADE[name]()
    assert made.pack is not None
    parts, _ = made.pack(torch.randn(64, 384, generator=torch.Generator().manual_seed(0)) / 20)
    quantization = quantization_of({"quantization_config": made.config})
    assert quantization is not None
    weights = packed_weights(quantization, {f"layer.{role}": HeldTensor(part) for role, part in parts.items()})
    weight = weights["layer.weight"]
    assert isinstance(weight, PackedWeight)
    return weight


def assert_equal_on_gpu(make: Callable[[torch.device | None], Panels]) -> None:
    expected = make(None)
    with a_gpu() as gpu:
        found = make(GPU)
        assert found.panels.device == GPU
        assert torch.equal(gpu.numbers(found.panels), expected.panels)
        if expected.order is not None:
            assert found.order is not None
            assert torch.equal(gpu.numbers(found.order), expected.order)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_file_become_the_same_panels(name: str) -> None:
    columns, num_bytes = next((columns, size) for each, columns, size in TYPES.values() if each == name)
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (40, 512 // columns * num_bytes), dtype=torch.uint8, generator=generator)
    assert_equal_on_gpu(lambda device: Panels(repack(lambda a, b: stored[a:b], 40, 512, LAYOUTS[name], device)))


@pytest.mark.parametrize("name", MADE)
def test_parts_of_a_weight_become_the_same_panels(name: str) -> None:
    assert_equal_on_gpu(weight_of(name).panels)


def test_experts_become_the_same_panels() -> None:
    weight = weight_of("awq")
    assert_equal_on_gpu(MergedPackedExperts([[weight, weight], [weight, weight]]).panels)


def test_threads_make_the_panels_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill parts of one tensor, the last of them with fewer rows than a panel has."""
    layout, row_bytes = LAYOUTS["Q4_0"], 2048 // 32 * 18
    stored = torch.randint(0, 256, (1001, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    callers: set[str] = set()

    def read(first: int, end: int) -> Tensor:
        callers.add(threading.current_thread().name)
        return stored[first:end]

    found = []
    for num_threads in (1, 3):
        monkeypatch.setattr(repacking, "available_cores", lambda times=num_threads: times * torch.get_num_threads())
        with torch.inference_mode():
            found.append(repack(read, 1001, 2048, layout))
    assert torch.equal(*found)
    assert len(callers) > 1
