"""How fast packed weights of files become panels, by format: one matrix, with arbitrary numbers.

    python -m benchmarks.repacking
    python -m benchmarks.repacking --device cuda

Seconds are those of one processor; a server uses all that it may. With `--device` the bytes of the file go to the
device, which makes the panels, and seconds are those of the clock.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.command import progress, run
from benchmarks.figures import Figure, figure
from corolla.chassis import heap
from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.repacking import Panels, repack
from corolla.models.gguf.header import TYPES
from corolla.models.quantized.description import quantization_of
from corolla.models.quantized.tensors import PackedWeight, packed_weights

_GROUP: Final = 128
_AWQ: Final = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True}
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}
_FP8: Final = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_GROUP, _GROUP]}
_TYPES: Final = {
    torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class HeldTensor:
    """Stands for a tensor in a safetensors file, and has it in memory: any shape, dtype and device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _TYPES[self._tensor.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--device", default="cpu", help="where panels are made")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    heap.expect_loading()
    device = torch.device(options.device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    numbers = options.outputs * options.inputs
    for name, make in {**_gguf(options.outputs, options.inputs), **_stored(options.outputs, options.inputs)}.items():
        progress(name)
        make(device)
        speeds = []
        for _ in range(options.rounds):
            started_s = clock()
            panels = make(device).panels
            panels[-1, -1, -1].item()  # waits for a device
            speeds.append(numbers / (clock() - started_s) / 1e6)
        yield figure(f"{name}, {options.outputs}x{options.inputs}", "million numbers/s", speeds)
    progress("")


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _gguf(num_outputs: int, num_inputs: int) -> Mapping[str, Callable[[torch.device], Panels]]:
    sizes = {name: (columns, num_bytes) for name, columns, num_bytes in TYPES.values()}

    def of(name: str) -> Callable[[torch.device], Panels]:
        columns, num_bytes = sizes[name]
        stored = _bytes(num_outputs, num_inputs // columns * num_bytes)
        return lambda device: Panels(
            repack(lambda first, end: stored[first:end], num_outputs, num_inputs, LAYOUTS[name], device)
        )

    return {name: of(name) for name in LAYOUTS}


def _stored(num_outputs: int, num_inputs: int) -> Mapping[str, Callable[[torch.device], Panels]]:
    groups = num_inputs // _GROUP
    words = _bytes(num_outputs * num_inputs // 2).view(torch.int32)
    zeros = _bytes(groups, num_outputs // 2).view(torch.int32)
    scales = torch.rand(groups, num_outputs).half()
    blocks = torch.rand(num_outputs // _GROUP, groups)
    formats: dict[str, tuple[Mapping[str, Any], dict[str, Tensor]]] = {
        "AWQ": (
            _AWQ, {"qweight": words.view(num_inputs, num_outputs // 8), "qzeros": zeros, "scales": scales}
        ),
        "GPTQ": (
            _GPTQ, {"qweight": words.view(num_inputs // 8, num_outputs), "qzeros": zeros, "scales": scales}
        ),
        "FP8": (
            _FP8,
            {
                "weight": _bytes(num_outputs, num_inputs).view(torch.float8_e4m3fn), "weight_scale_inv": blocks,
            },
        ),
    }  # fmt: skip
    found: dict[str, Callable[[torch.device], Panels]] = {}
    for name, (described, parts) in formats.items():
        quantization = quantization_of({"quantization_config": described})
        assert quantization is not None
        weights = packed_weights(quantization, {f"layer.{role}": HeldTensor(part) for role, part in parts.items()})
        weight = weights["layer.weight"]
        assert isinstance(weight, PackedWeight)
        found[name] = weight.panels
    return found


if __name__ == "__main__":
    run(__doc__, add_options, measure)
