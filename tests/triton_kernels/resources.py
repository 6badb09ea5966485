"""Prints the shared memory of kernels, and the bytes of registers that are spilled, for the smallest known GPU.

The shapes are those that take the most of both.
"""

import os
import re
import subprocess
import sys
import tempfile
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.page_tables import PageTables
from corolla.kernels.triton import compilation
from corolla.kernels.triton.expert_launches import ChosenExperts, multiply_packed_experts
from corolla.kernels.triton.launches import attend, multiply
from corolla.kernels.triton.packed_launches import multiply_packed
from tests.triton_kernels import PACKAGES

ARCH: Final = min(compilation.SHARED_MEMORY, key=lambda arch: compilation.SHARED_MEMORY[arch])
TOOLS: Final = PACKAGES / "triton" / "backends" / "nvidia" / "bin"
PAGE_TOKENS: Final = 64


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def attend_by(head: int, dtype: torch.dtype) -> None:
    """Attends for a single token, and for a chunk, with bounded scores and a window, and to latents."""
    one, two = (empty(count, dtype=torch.int32) for count in (1, 2))
    pages = empty(PAGE_TOKENS, 2, head, dtype=dtype)
    for num_queries in (1, PAGE_TOKENS):
        tables = PageTables(
            first_queries=two, first_pages=one, num_keys=one, pages=one[:, None],
            max_queries=num_queries, num_pages=1, page_tokens=PAGE_TOKENS,
        )  # fmt: skip
        query = empty(num_queries, 4, head, dtype=dtype)
        attend(query, pages, pages, tables, scaling=0.1, window=4096, softcap=50.0)
        # Multi-latent attention, with the sizes of DeepSeek-V3.
        latents, rotated = (empty(PAGE_TOKENS, 1, size, dtype=dtype) for size in (512, 64))
        attend(empty(num_queries, 128, 576, dtype=dtype), latents, rotated, tables, scaling=0.1)


def multiply_all(dtype: torch.dtype) -> None:
    layout = LAYOUTS["Q6_K"]
    panels = empty(256, 16, layout.block_bytes, dtype=torch.uint8)
    for num_rows in (16, 32, 64, 128):
        rows = empty(num_rows, 4096, dtype=dtype)
        multiply(rows, empty(4096, 4096, dtype=dtype))
        multiply_packed(layout, rows, panels, 4096)
        integers = (empty(count, dtype=torch.int32) for count in (num_rows, 2))
        multiply_packed_experts(layout, rows, panels, 4096, ChosenExperts(rows[:, :1], *integers))


def spilled_bytes(code: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        printed = subprocess.check_output(
            [os.fspath(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name], text=True
        )
    return int(re.findall(r"STACK:(\d+)", printed)[0])


def print_resources(_compilation: Any, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    sys.stdout.write(f"{kernel.__name__} {compiled.metadata.shared} {spilled_bytes(compiled.asm['cubin'])}\n")


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch, compilation.compiling(ARCH):
        patch.setattr(compilation.Compilation, "compile", print_resources)
        for each in (torch.bfloat16, torch.float32):
            for size in (96, 128, 256):
                attend_by(size, each)
            multiply_all(each)
