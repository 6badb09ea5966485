"""Packed weights of each layout: every weight bit for bit, and no row of a product depends on the others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.kernels.expert_routing import Routing
from corolla.kernels.layouts import LAYOUTS, Layout, Number, Scale, SubScale, group_layout
from corolla.kernels.products import kernel_of
from corolla.kernels.repacking import Numbers, repack_numbers
from corolla.kernels.triton.expert_launches import choose_experts, multiply_experts, multiply_packed_experts
from corolla.kernels.triton.launches import multiply
from corolla.kernels.triton.packed_launches import SCALES, expand_packed, multiply_packed
from tests.tiers import quick
from tests.triton_kernels import DEVICE
from tests.triton_kernels.ordered_products import install

NUM_OUTPUTS, NUM_COLUMNS = 72, 512
GROUPS = [
    group_layout(size, scale, has_zeros=has_zeros)
    for size, scale in ((128, Scale.FLOAT16), (64, Scale.BFLOAT16), (32, Scale.FLOAT32))
    for has_zeros in (False, True)
]
# Weights that are quantised as they are read, and FP8.
GROUPS += [
    group_layout(256, Scale.FLOAT32, number=Number.INT8),
    group_layout(128, Scale.FLOAT32, number=Number.E4M3),
    group_layout(64, Scale.FLOAT32, number=Number.E5M2),
    group_layout(128, Scale.FLOAT16, has_zeros=True, number=Number.INT8),
    group_layout(32, Scale.BFLOAT16, has_minimum=True),
    group_layout(32, Scale.FLOAT32, has_minimum=True),
]
# MXFP4 and NVFP4.
GROUPS += [
    group_layout(32, Scale.E8M0, number=Number.E2M1),
    group_layout(128, Scale.FLOAT32, number=Number.E2M1, sub_scale=(16, SubScale.E4M3)),
    group_layout(64, Scale.FLOAT32, number=Number.E2M1, sub_scale=(16, SubScale.E4M3_DIVIDED)),
]
TYPES = [*LAYOUTS.values(), *(layout for layout in GROUPS if layout is not None)]


@pytest.fixture(autouse=True, scope="module")
def one_order() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, torch.device(DEVICE):
        install(patch)
        yield


def drawn_panels(layout: Layout, num_rows: int = NUM_OUTPUTS, seed: int = 1) -> Tensor:
    """Returns panels of arbitrary numbers and scales; each part of a block takes all of its values."""
    with torch.device("cpu"):
        return _drawn_panels(layout, num_rows, seed)


def _drawn_panels(layout: Layout, num_rows: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    num_blocks = NUM_COLUMNS // layout.block_weights

    def whole(least: int, end: int, columns: int, kind: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(least, end, (num_rows, columns), generator=source).to(kind)

    def small(kind: torch.dtype) -> Tensor:
        if kind == torch.uint8:
            return whole(0, 129, num_blocks, kind)
        drawn = torch.randn(num_rows, num_blocks, generator=source)
        return (drawn + drawn.sign() if layout.divides else drawn.div(64)).to(kind)

    has_sub, per_block = layout.has_sub_scales, layout.units * layout.scales_per_unit
    codes = whole(0, 1 << layout.bits, NUM_COLUMNS, torch.uint8)
    if layout.bits == 8 and layout.is_float:
        not_finite = 0x7F if layout.exponent_bits == 4 else 0x7C
        codes[codes & not_finite == not_finite] = 0
    numbers = Numbers(
        codes,
        small(SCALES[layout.scale]),
        minima=small(SCALES[layout.scale]) if layout.has_minimum else None,
        sub_scales=whole(-128 if layout.is_centred else 0, 64, num_blocks * per_block) if has_sub else None,
        sub_minima=whole(0, 64, num_blocks * layout.units) if has_sub and layout.has_minimum else None,
        zeros=whole(-layout.middle, layout.middle, num_blocks) if layout.has_zeros else None,
    )

    def read(first: int, end: int) -> Numbers:
        parts: dict[str, Any] = {name: getattr(numbers, name) for name in Numbers.__slots__}
        return Numbers(**{name: part[first:end] for name, part in parts.items() if part is not None})

    return repack_numbers(read, num_rows, NUM_COLUMNS, layout)


def weights_of(layout: Layout, panels: Tensor) -> Tensor:
    with torch.device("cpu"):
        return kernel_of(layout).expand(torch.arange(NUM_OUTPUTS), panels, NUM_COLUMNS)


# One of each number of bits, of each type of scale, with and without zero points, minima and sub-scales.
QUICK_TYPES = [
    TYPES[0], *(each for each in TYPES if each.name in ("Q5_1", "Q5_K", "Q6_K")), *TYPES[9:14:2], *TYPES[14:-2],
    TYPES[-1],
]  # fmt: skip


@pytest.mark.parametrize("layout", quick(TYPES, *QUICK_TYPES), ids=lambda layout: layout.name)
def test_weights_have_the_bits_that_they_have_on_a_processor(layout: Layout) -> None:
    panels = drawn_panels(layout)
    row_ids = torch.randperm(NUM_OUTPUTS, generator=torch.Generator().manual_seed(2), device="cpu")[:19]
    expected = weights_of(layout, panels)[row_ids].to(DEVICE)
    row_ids, panels = row_ids.to(DEVICE), panels.to(DEVICE)
    assert torch.equal(expand_packed(layout, row_ids, panels, torch.float32), expected)
    assert torch.equal(expand_packed(layout, row_ids, panels, torch.float16), expected.half())


CASES = [(layout, torch.float16) for layout in TYPES] + [(LAYOUTS["Q6_K"], torch.float32)]
# One case of each way to unpack: 4 bits, 8 bits, and parts that lie apart.
QUICK = [(layout, dtype) for layout, dtype in CASES[:-1] if layout.name in ("Q4_0", "Q6_K", "E4M3 of 128, float32")]


@pytest.mark.parametrize(
    "case", quick(CASES, *QUICK), ids=lambda case: f"{case[0].name}, {str(case[1]).removeprefix('torch.')}"
)
def test_a_product_has_the_bits_of_the_product_of_expanded_weights(case: tuple[Layout, torch.dtype]) -> None:
    layout, dtype = case
    panels = drawn_panels(layout)
    source = torch.Generator().manual_seed(3)
    rows = torch.randn(70, NUM_COLUMNS, generator=source, device="cpu").to(DEVICE, dtype)
    bias = torch.randn(NUM_OUTPUTS, generator=source, device="cpu").to(DEVICE, dtype)
    expanded = weights_of(layout, panels).to(DEVICE, dtype)
    panels = panels.to(DEVICE)
    whole = multiply_packed(layout, rows, panels, NUM_OUTPUTS, bias)
    assert torch.equal(whole, multiply(rows, expanded, bias))
    for start, end in ((0, 1), (3, 33), (20, 70)):
        assert torch.equal(multiply_packed(layout, rows[start:end], panels, NUM_OUTPUTS, bias), whole[start:end])
    # Few rows of a matrix with many outputs have another tile.
    assert torch.equal(multiply_packed(layout, rows[:3], panels, NUM_OUTPUTS, bias, tiled_outputs=1 << 14), whole[:3])
    order = torch.randperm(NUM_COLUMNS, generator=source, device="cpu").to(DEVICE)
    shuffled = torch.empty_like(rows).index_copy_(1, order, rows)
    assert torch.equal(multiply_packed(layout, shuffled[:2], panels, NUM_OUTPUTS, bias, order.int()), whole[:2])


NUM_EXPERTS, NUM_CHOSEN, NUM_TOKENS = 5, 2, 45


# Experts are unpacked by the functions of layers, which the test above tries with every layout.
OF_EXPERTS = [*QUICK, *((layout, torch.float16) for layout in (LAYOUTS["Q4_K"], LAYOUTS["Q8_0"], TYPES[-3]))]


@pytest.mark.parametrize(
    "case", quick(OF_EXPERTS, QUICK[0]), ids=lambda case: f"{case[0].name}, {str(case[1]).removeprefix('torch.')}"
)
def test_a_product_of_experts_has_the_bits_of_that_of_expanded_experts(case: tuple[Layout, torch.dtype]) -> None:
    """More pairs of one expert than a tile has, an expert without a token, and panels with too many rows."""
    layout, dtype = case
    panels = torch.cat([drawn_panels(layout, seed=seed) for seed in range(NUM_EXPERTS)])
    expanded = torch.stack([weights_of(layout, each) for each in panels.chunk(NUM_EXPERTS)]).to(DEVICE, dtype)
    panels = panels.to(DEVICE)
    source = torch.Generator().manual_seed(4)
    rows = torch.randn(NUM_TOKENS, NUM_COLUMNS, generator=source, device="cpu").to(DEVICE, dtype)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=source, device="cpu")
    logits[:, 0] = -100
    logits[5:40, 1] = 100
    logits, routing = logits.to(DEVICE), Routing(NUM_EXPERTS, NUM_CHOSEN, "softmax")
    chosen = choose_experts(logits, routing)
    bias = torch.randn(NUM_EXPERTS, NUM_OUTPUTS, generator=source, device="cpu").to(DEVICE, dtype)
    with_bias = multiply_packed_experts(layout, rows, panels, NUM_OUTPUTS, chosen, bias)
    assert torch.equal(with_bias, multiply_experts(rows, expanded, chosen, bias))
    whole = multiply_packed_experts(layout, rows, panels, NUM_OUTPUTS, chosen)
    assert torch.equal(whole, multiply_experts(rows, expanded, chosen))
    # A row for each pair, as the second product of an expert has it.
    each = rows.repeat_interleave(NUM_CHOSEN, 0)
    assert torch.equal(multiply_packed_experts(layout, each, panels, NUM_OUTPUTS, chosen), whole)
    for start, end in ((0, 1), (3, 20)):
        part = choose_experts(logits[start:end], routing)
        found = multiply_packed_experts(layout, rows[start:end], panels, NUM_OUTPUTS, part)
        assert torch.equal(found, whole[start * NUM_CHOSEN : end * NUM_CHOSEN])


def test_rows_of_another_length_are_refused() -> None:
    panels, rows = drawn_panels(LAYOUTS["Q4_0"]), torch.ones(1, NUM_COLUMNS + 32)
    with pytest.raises(ValueError, match="do not fit"):
        multiply_packed(LAYOUTS["Q4_0"], rows, panels, NUM_OUTPUTS)
    chosen = choose_experts(torch.zeros(1, 1), Routing(1, 1, "softmax"))
    with pytest.raises(ValueError, match="do not fit"):
        multiply_packed_experts(LAYOUTS["Q4_0"], rows, panels, NUM_OUTPUTS, chosen)
