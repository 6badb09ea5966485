"""Prints how many neighbouring columns a thread gives a tensor core instruction at a time.

It does so for packed layouts, and for codecs of keys and values. Two is what products of expanded weights have. Another
number gives each instruction other columns, and other bits. The second number of a layout says how often threads
exchange as many numbers as a round has weights: each time is a way of all weights through shared memory.
"""

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from corolla.cache.codecs import CODECS
from corolla.kernels.layouts import LAYOUTS, Layout, Number, Scale, SubScale, group_layout
from corolla.kernels.page_tables import PageTables
from corolla.kernels.triton import compilation
from corolla.kernels.triton.expert_launches import ChosenExperts, multiply_packed_experts
from corolla.kernels.triton.launches import attend, multiply, row_counts
from corolla.kernels.triton.packed_launches import multiply_packed

NUM_OUTPUTS, NUM_COLUMNS = 64, 512
# A round has twice as many or more; the results of a tile are fewer.
LEAST_WEIGHTS = 4096


GROUPS = [
    group_layout(128, Scale.FLOAT16, has_zeros=True),
    group_layout(32, Scale.BFLOAT16, has_minimum=True),
    group_layout(256, Scale.FLOAT32, number=Number.INT8),
    group_layout(128, Scale.FLOAT32, number=Number.E4M3),
    group_layout(64, Scale.FLOAT32, number=Number.E5M2),
    group_layout(128, Scale.FLOAT16, has_zeros=True, number=Number.INT8),
    group_layout(32, Scale.E8M0, number=Number.E2M1),
    group_layout(128, Scale.FLOAT32, number=Number.E2M1, sub_scale=(16, SubScale.E4M3)),
    group_layout(128, Scale.FLOAT32, number=Number.E2M1, sub_scale=(16, SubScale.E4M3_DIVIDED)),
]


def columns_of(layout: Layout, arch: int) -> tuple[set[str], int]:
    """What the product of a layer, and that of experts, has: both have the same."""
    panels = torch.empty(NUM_OUTPUTS // 16, NUM_COLUMNS // layout.block_weights, layout.block_bytes, device="meta")
    panels = panels.to(torch.uint8)
    rows = torch.empty(1, NUM_COLUMNS, dtype=torch.float16, device="meta")
    chosen = ChosenExperts(rows[:, :1], *(torch.empty(size, dtype=torch.int32, device="meta") for size in (1, 3)))
    of_layer = _columns_in(text_of(lambda: multiply_packed(layout, rows, panels, NUM_OUTPUTS), arch))
    of_experts = text_of(lambda: multiply_packed_experts(layout, rows, panels, NUM_OUTPUTS // 2, chosen), arch)
    assert _columns_in(of_experts) == of_layer, layout.name
    return of_layer


def _columns_in(text: str) -> tuple[set[str], int]:
    exchanges = re.findall(r"ttg\.(?:convert_layout|local_alloc|local_store) %.*?tensor<([\dx]+)x", text)
    num_large = sum(math.prod(map(int, shape.split("x"))) >= LEAST_WEIGHTS for shape in exchanges)
    return widths_in(text), num_large


def widths_in(text: str) -> set[str]:
    return set(re.findall(r"kWidth = (\d+)", text))


def text_of(launch: Callable[[], object], arch: int) -> str:
    """The texts of all kernels that `launch` launches."""
    texts: list[str] = []

    def compile_kernel(_compilation: Any, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        texts.append(kernel.warmup(*arguments, grid=grid, **options).asm["ttgir"])

    with pytest.MonkeyPatch.context() as patch, compilation.compiling(arch):
        patch.setattr(compilation.Compilation, "compile", compile_kernel)
        launch()
    return "".join(texts)


def attend_to_codes(codec: str) -> None:
    """Attends for a single token, and for a chunk; no token may depend on which of both computes it."""
    dtype = torch.float16
    pages = torch.empty(64, 2, CODECS[codec](dtype).stored_size(64), dtype=torch.int8, device="meta")
    for num_queries in (1, 64):
        one, two = (torch.empty(count, dtype=torch.int32, device="meta") for count in (1, 2))
        tables = PageTables(
            first_queries=two, first_pages=one, num_keys=one, pages=one[:, None],
            max_queries=num_queries, num_pages=1, page_tokens=64,
        )  # fmt: skip
        query = torch.empty(num_queries, 8, 64, dtype=dtype, device="meta")
        attend(query, pages, pages, tables, scaling=0.125, codec=codec)


def instructions_of_products(dtype: torch.dtype, arch: int) -> set[str]:
    """The kinds of tensor core instructions in the tiles of a product."""
    weight = torch.empty(NUM_OUTPUTS, NUM_COLUMNS, dtype=dtype, device="meta")
    shapes = [(count, NUM_COLUMNS) for count in row_counts()]
    texts = [text_of(partial(multiply, weight.new_empty(shape), weight), arch) for shape in shapes]
    return {kind for text in texts for kind in re.findall(r"versionMajor = \d|tc_gen5_mma", text)}


if __name__ == "__main__":
    for each in (*LAYOUTS.values(), *filter(None, GROUPS)):
        widths, exchanges = columns_of(each, 90)
        sys.stdout.write(f"{each.name}: {' '.join(widths)} {exchanges}\n")
    for dtype in (torch.bfloat16, torch.float16):
        sys.stdout.write(f"instructions for {dtype}: {', '.join(instructions_of_products(dtype, 100))}\n")
    for name in CODECS:
        sys.stdout.write(f"{name}: {' '.join(widths_in(text_of(partial(attend_to_codes, name), 90)))}\n")
