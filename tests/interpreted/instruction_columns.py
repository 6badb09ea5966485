"""Prints, for packed layouts, how many neighbouring columns a thread gives a tensor core instruction at a time.

Two is what products of expanded weights have. Another number gives each instruction other columns, and other bits. The
second number says how often threads exchange as many numbers as a round has weights: each time is a way of all weights
through shared memory.
"""

import math
import re
import sys
from typing import Any

import pytest
import torch

from corolla.kernels.layouts import LAYOUTS, Layout, Number, Scale, group_layout
from corolla.kernels.triton import compilation
from corolla.kernels.triton.packed_launches import multiply_packed

NUM_OUTPUTS, NUM_COLUMNS = 64, 512
# A round has several times as many.
LEAST_WEIGHTS = 2048


GROUPS = [
    group_layout(128, Scale.FLOAT16, has_zeros=True),
    group_layout(32, Scale.BFLOAT16, has_minimum=True),
    group_layout(256, Scale.FLOAT32, number=Number.INT8),
    group_layout(128, Scale.FLOAT32, number=Number.E4M3),
]


def columns_of(layout: Layout, arch: int) -> tuple[set[str], int]:
    texts: list[str] = []

    def compile_kernel(_compilation: Any, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        texts.append(kernel.warmup(*arguments, grid=grid, **options).asm["ttgir"])

    panels = torch.empty(NUM_OUTPUTS // 16, NUM_COLUMNS // layout.block_weights, layout.block_bytes, device="meta")
    rows = torch.empty(1, NUM_COLUMNS, dtype=torch.float16, device="meta")
    with pytest.MonkeyPatch.context() as patch, compilation.compiling(arch):
        patch.setattr(compilation.Compilation, "compile", compile_kernel)
        multiply_packed(layout, rows, panels.to(torch.uint8), NUM_OUTPUTS)
    text = "".join(texts)
    exchanges = re.findall(r"ttg\.(?:convert_layout|local_alloc|local_store) %.*?tensor<([\dx]+)x", text)
    num_large = sum(math.prod(map(int, shape.split("x"))) >= LEAST_WEIGHTS for shape in exchanges)
    return set(re.findall(r"kWidth = (\d+)", text)), num_large


if __name__ == "__main__":
    for each in (*LAYOUTS.values(), *filter(None, GROUPS)):
        widths, exchanges = columns_of(each, 90)
        sys.stdout.write(f"{each.name}: {' '.join(widths)} {exchanges}\n")
