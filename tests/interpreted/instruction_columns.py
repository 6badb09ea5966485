"""Prints, for packed layouts, how many neighbouring columns a thread gives a tensor core instruction at a time.

Two is what products of expanded weights have. Another number gives each instruction other columns, and other bits.
"""

import re
import sys
from typing import Any

import pytest
import torch

from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.triton import compilation
from corolla.kernels.triton.packed_launches import multiply_packed

NUM_OUTPUTS, NUM_COLUMNS = 64, 512


def columns_of(layout_name: str, arch: int) -> set[str]:
    layout = LAYOUTS[layout_name]
    texts: list[str] = []

    def compile_kernel(_compilation: Any, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        texts.append(kernel.warmup(*arguments, grid=grid, **options).asm["ttgir"])

    panels = torch.empty(NUM_OUTPUTS // 16, NUM_COLUMNS // layout.block_weights, layout.block_bytes, device="meta")
    rows = torch.empty(1, NUM_COLUMNS, dtype=torch.float16, device="meta")
    with pytest.MonkeyPatch.context() as patch, compilation.compiling(arch):
        patch.setattr(compilation.Compilation, "compile", compile_kernel)
        multiply_packed(layout, rows, panels.to(torch.uint8), NUM_OUTPUTS)
    return set(re.findall(r"kWidth = (\d+)", "".join(texts)))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(f"{name} {' '.join(columns_of(name, 90))}\n")
