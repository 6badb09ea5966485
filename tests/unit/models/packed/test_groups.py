"""Weights of AWQ, GPTQ and compressed-tensors stay packed, and are the numbers that their formats stand for."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from corolla.chassis.weight_formats import weight_format
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.kernels import weights_source
from corolla.kernels.layouts import Layout, Number, Scale, SubScale, group_layout
from corolla.kernels.products import NARROW, WIDE, Kernel, kernel_of
from corolla.kernels.repacking import Numbers, repack_numbers, unpack
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import open_tensors
from corolla.models.edges import head_bytes, load_edges
from corolla.models.packed.modules import (
    EXPERT_WEIGHTS,
    PackedExperts,
    PackedExpertWeights,
    PackedLinear,
    are_usual,
    have_neighbours,
)
from corolla.models.quantized.description import quantization_of
from corolla.models.quantized.floats import layout_of_octets, numbers_of_octets, scale_numbers
from corolla.models.quantized.fp4 import e2m1, fp4_numbers, mxfp4_layout, nvfp4_layout
from corolla.models.quantized.stored_tensors import Unfit
from corolla.models.quantized.tensors import PackedWeight, packed_weights
from corolla.models.span_model import load_span, make_span, weight_types
from corolla.wire.span import Span
from tests.quantized_checkpoints import (
    FORMATS,
    Made,
    Packed,
    awq,
    compressed_tensors,
    fp8_of_outputs,
    gptq,
    make_packed_checkpoint,
    mxfp4,
    nvfp4,
)  # fmt: skip
from tests.tiers import quick

NUM_COLUMNS = 512
SCALES = {Scale.FLOAT16: torch.float16, Scale.BFLOAT16: torch.bfloat16, Scale.FLOAT32: torch.float32}
LAYOUTS = {
    layout.name: layout
    for block, scale, has_zeros, number in (
        (32, Scale.FLOAT16, True, Number.UINT4), (64, Scale.BFLOAT16, False, Number.UINT4),
        (128, Scale.FLOAT16, True, Number.UINT4), (128, Scale.FLOAT32, True, Number.UINT4),
        (256, Scale.FLOAT32, False, Number.UINT4), (256, Scale.BFLOAT16, True, Number.UINT4),
        (128, Scale.FLOAT16, True, Number.INT8), (32, Scale.FLOAT32, True, Number.INT8),
    )
    if (layout := group_layout(block, scale, has_zeros=has_zeros, number=number)) is not None
}  # fmt: skip
LAYOUTS |= {
    layout.name: layout
    for layout in (
        mxfp4_layout(NUM_COLUMNS), nvfp4_layout(NUM_COLUMNS, SubScale.E4M3),
        nvfp4_layout(NUM_COLUMNS // 4, SubScale.E4M3_DIVIDED),
    )
}  # fmt: skip
WHOLE = Span(0, 4)
SPLITS = ([WHOLE], [Span(0, 2), Span(2, 4)], [Span(0, 1), Span(1, 3), Span(3, 4)])
_ct = partial(compressed_tensors, "pack-quantized", num_bits=4)
KEPT: dict[str, Callable[[], Made]] = {
    **{f"awq of {size}": partial(awq, size) for size in (32, 64, 128)},
    **{f"gptq of {size}": partial(gptq, 4, size) for size in (32, 64, 128, -1)},
    **{f"gptq of 8 bits, {size}": partial(gptq, 8, size) for size in (32, -1)},
    "gptq of 8 bits with activation order": partial(gptq, 8, 64, is_ordered=True),
    "fp8 next to nvfp4": partial(nvfp4, fp8=(96,)),
    "fp8 E5M2 of outputs": partial(fp8_of_outputs, kind=torch.float8_e5m2),
    "w8a16 with zero points": partial(_ct, num_bits=8, strategy="group", group_size=64, symmetric=False),
    "gptq with activation order": partial(gptq, 4, 64, is_ordered=True),
    "gptq without an index": partial(gptq, is_symmetric=True, has_g_idx=False),
    "gptq_v2": partial(gptq, layout="gptq_v2"),
    **{f"w4a16 of {size}": partial(_ct, strategy="group", group_size=size) for size in (32, 128)},
    "w4a16 with zero points": partial(_ct, strategy="group", group_size=64, symmetric=False),
    "w4a16 of outputs": partial(_ct, strategy="channel"),
    "w4a16 of outputs with zero points": partial(_ct, strategy="channel", symmetric=False),
    "w4a16 with one scale": partial(_ct, strategy="tensor"),
    **{
        name: FORMATS[name]
        for name in (
            "fp8-blocks", "fp8-blocks-bf16-scales", "fp8-one-scale", "fp8-outputs", "ct-fp8-outputs",
            "ct-fp8-one-scale", "ct-mxfp4", "ct-mxfp8", "ct-nvfp4", "nvfp4", "w8a8", "w8a8-asymmetric", "w8a16",
        )
    },
}  # fmt: skip


def broken_groups() -> Made:
    """GPTQ of which one group has an input more than the others."""
    made = gptq(4, 96)

    def pack(weight: Tensor) -> Packed:
        assert made.pack is not None
        parts, expected = made.pack(weight)
        parts["g_idx"][0] = parts["g_idx"][-1]
        return parts, expected

    return Made(made.config, pack)


def large_scale(own: float = 1.0) -> Made:
    """NVFP4 with another scale of its scales, which are up to 448."""
    made = nvfp4()

    def pack(weight: Tensor) -> Packed:
        assert made.pack is not None
        parts, expected = made.pack(weight)
        return {**parts, "weight_scale_2": torch.tensor(own)}, expected

    return Made(made.config, pack)


EXPANDED: dict[str, tuple[Callable[[], Made], str]] = {
    "three bits": (FORMATS["gptq-3-bits"], "has 3 bits"),
    "short groups": (partial(awq, 16), "has groups of 16 of 384 inputs"),
    "broken groups": (broken_groups, "has groups that are not all of 96 inputs"),
    "a large scale": (large_scale, "has a scale that is not below 4"),
    "a scale that is no number": (partial(large_scale, torch.nan), "has a scale that is not below 4"),
    "floats in short blocks": (FORMATS["ct-fp8-blocks"], "has groups of 40 of 384 inputs"),
}


def random_numbers(name: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """Panels, and the numbers that they stand for: an integer less a zero point, times a scale, rounded once."""
    layout = LAYOUTS[name]
    if layout.is_float:
        return random_floats(layout, num_rows)
    generator = torch.Generator().manual_seed(0)
    shape = (num_rows, NUM_COLUMNS // layout.block_weights)
    codes = torch.randint(0, 1 << layout.bits, (num_rows, NUM_COLUMNS), generator=generator).to(torch.uint8)
    scales = (torch.randn(shape, generator=generator) / 64).to(SCALES[layout.scale])
    middle = layout.middle
    zeros = torch.randint(-middle, middle, shape, generator=generator).to(torch.int8) if layout.has_zeros else None
    stored = codes if layout.bits == 4 else codes ^ middle

    def read(start: int, end: int) -> Numbers:
        return Numbers(stored[start:end], scales[start:end], zeros=None if zeros is None else zeros[start:end])

    numbers = (codes.float() - middle).view(*shape, -1)
    numbers = numbers if zeros is None else numbers - zeros.float()[..., None]
    weights = (numbers * scales.float()[..., None]).view(num_rows, NUM_COLUMNS)
    return repack_numbers(read, num_rows, NUM_COLUMNS, layout), weights


def random_floats(layout: Layout, num_rows: int) -> tuple[Tensor, Tensor]:
    """Panels, and the numbers that they stand for, with the smallest and the largest scales."""
    generator = torch.Generator().manual_seed(0)
    octets = torch.randint(0, 256, (num_rows, NUM_COLUMNS // 2), generator=generator).to(torch.uint8)
    most, group, own = 129, 32, None
    if layout.has_sub_scales:
        most, group, own = 0x7F, 16, torch.tensor([115.7 if layout.divides else 0.0087])
    scales = torch.randint(0, most, (num_rows, NUM_COLUMNS // group), generator=generator).to(torch.uint8)
    panels = repack_numbers(
        lambda start, end: fp4_numbers(octets[start:end], scales[start:end], layout, own), num_rows, NUM_COLUMNS, layout
    )
    factors = scale_numbers(scales)
    if own is not None:
        factors = scales.view(torch.float8_e4m3fn).float()
        factors = factors / own if layout.divides else factors * own
    return panels, e2m1(octets) * factors.repeat_interleave(group, 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_of_a_weight_is_that_of_its_integer_zero_point_and_scale(name: str) -> None:
    panels, weights = random_numbers(name, 100)
    row_ids = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernel_of(LAYOUTS[name]).expand(row_ids, panels, NUM_COLUMNS), weights[row_ids])
    assert len(LAYOUTS) == 11
    offsets = (LAYOUTS[name].minima_at, LAYOUTS[name].low_at, LAYOUTS[name].block_bytes)
    assert not any(offset % 16 for offset in offsets)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_weights_whatever_other_rows_there_are(name: str, dtype: torch.dtype) -> None:
    panels, weights = random_numbers(name, 200)
    rows = torch.randn(19, NUM_COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)
    kernel = kernel_of(LAYOUTS[name], dtype)
    product = kernel.multiply(rows, panels)[:, :200]
    error = (product.double() - rows.double() @ weights.double().T).abs()
    rounding = NUM_COLUMNS * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 0)
    assert bool((error <= rounding * (rows.double().abs() @ weights.double().abs().T)).all())
    for count in (1, 2, 3, 8, 11):
        assert torch.equal(kernel.multiply(rows[:count], panels)[:, :200], product[:count])


def test_the_small_tiles_of_other_processors_give_the_same_bits() -> None:
    name = "U4 of 128, float16, zero points"
    panels, _ = random_numbers(name, 150)
    rows = torch.randn(23, NUM_COLUMNS, generator=torch.Generator().manual_seed(4))
    expected = kernel_of(LAYOUTS[name]).multiply(rows, panels)
    for tilings in (WIDE, NARROW):
        assert torch.equal(Kernel(LAYOUTS[name], tilings=tilings).multiply(rows, panels), expected)


def test_processors_without_a_table_of_floats_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = mxfp4_layout(NUM_COLUMNS)
    panels, weights = random_numbers(layout.name, 40)
    monkeypatch.setattr(weights_source, "processor_features", dict)
    assert torch.equal(Kernel(layout, tilings=NARROW).expand(torch.arange(40), panels, NUM_COLUMNS), weights)


@contextlib.contextmanager
def packed_weight(folder: Path, made: Made) -> Iterator[tuple[PackedWeight, Tensor]]:
    """A weight of a checkpoint, `[96, 384]`, and what it stands for by its format's own library."""
    assert made.pack is not None
    parts, expected = made.pack(torch.randn(96, 384, generator=torch.Generator().manual_seed(0)))
    parts = {f"m.{ending}": part.contiguous() for ending, part in parts.items()}
    save_file(parts, folder / "file")
    quantization = quantization_of({"quantization_config": made.config})
    assert quantization is not None
    with open_tensors(dict.fromkeys(parts, folder / "file"), {part: part for part in parts}) as stored:
        weight = packed_weights(quantization, stored)["m.weight"]
        assert isinstance(weight, PackedWeight)
        yield weight, expected.float()


@pytest.mark.parametrize("name", KEPT)
def test_a_packed_weight_is_what_its_library_expands(tmp_path: Path, name: str) -> None:
    with packed_weight(tmp_path, KEPT[name]()) as (weight, expected):
        assert torch.equal(weight[...], expected)
        panels, order = weight.panels()
        assert (order is not None) == ("activation order" in name)
        layout = weight.layout()
    columns = kernel_of(layout).expand(torch.arange(96), panels, 384)
    assert torch.equal(columns, expected if order is None else expected[:, order])
    assert torch.equal(unpack(panels, layout, 96), columns)
    # A number, and at worst 32 bits of a scale and eight of a zero point for 32 of them.
    assert panels.nbytes <= 96 * 384 * (layout.bits + 40 / 32) / 8


@pytest.mark.parametrize(
    "kind, dtype, odd",
    [
        ("F8_E4M3", torch.float8_e4m3fn, torch.nan),
        ("F8_E5M2", torch.float8_e5m2, torch.nan),
        ("F8_E5M2", torch.float8_e5m2, -torch.inf),
    ],
)
def test_a_number_that_is_not_finite_makes_its_block_nan_and_large_scales_have_no_kernel(
    kind: str, dtype: torch.dtype, odd: float
) -> None:
    layout = layout_of_octets(kind, torch.tensor(127.0), 64, 128)
    numbers = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers[3, 70] = odd

    def read(start: int, end: int) -> Numbers:
        return numbers_of_octets(numbers[start:end], torch.tensor([[0.3]]), layout)

    found = kernel_of(layout).expand(torch.arange(16), repack_numbers(read, 16, 128, layout), 128)
    expected = numbers.float() * torch.tensor(0.3)
    expected[3, 64:] = torch.nan
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for scale in (128.0, -200.0, torch.nan):
        with pytest.raises(Unfit, match="has a scale that is not below 128"):
            layout_of_octets(kind, torch.tensor([1.0, scale]), 64, 128)


@pytest.mark.parametrize("name", EXPANDED)
def test_what_has_no_kernel_says_why(tmp_path: Path, name: str) -> None:
    make, reason = EXPANDED[name]
    with packed_weight(tmp_path, make()) as (weight, _), pytest.raises(Unfit, match=reason):
        weight.layout()


def checkpoint_of(folder: Path, name: str, family: str = "llama", **options: Any) -> tuple[Checkpoint, Checkpoint]:
    """A packed model, and the same expanded."""
    packed, expanded = make_packed_checkpoint(family, folder, FORMATS[name](), **options)
    return Checkpoint.from_pretrained(str(packed)), Checkpoint.from_pretrained(str(expanded))


def logits(checkpoint: Checkpoint, spans: list[Span], quantization: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of a chain of servers, of which the first one embeds and the last one has the head."""
    token_ids = torch.arange(5, 45)
    edges = load_edges(checkpoint, dtype=dtype, quantization=quantization)
    hidden = edges.embed(token_ids, torch.arange(40))
    for span in spans:
        runner = SpanRunner(load_span(checkpoint, span, dtype=dtype, quantization=quantization), products="library")
        cache = runner.new_cache()
        cache.reserve(40)
        hidden = runner.forward([RowWork(cache, 0, 40)], hidden, span)
    return edges.head(hidden)


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
@pytest.mark.parametrize(
    "name", ["awq", "gptq-act-order", pytest.param("w4a16-asymmetric", marks=pytest.mark.kind), "fp8-blocks"]
)
def test_a_packed_chain_equals_itself_unsplit_and_the_expanded_one_up_to_rounding(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    packed, expanded = checkpoint_of(tmp_path, name, with_head=True)
    unsplit, exact = logits(packed, [WHOLE], "packed", dtype), logits(expanded, [WHOLE], "none")
    if dtype == torch.float32:
        torch.testing.assert_close(unsplit, exact, rtol=1e-4, atol=1e-4)
    else:
        # Weights are rounded no more often than those that are expanded to this type.
        assert float((unsplit - exact).std()) < 1.2 * float((logits(expanded, [WHOLE], "none", dtype) - exact).std())
    for spans in SPLITS[1:]:
        assert torch.equal(logits(packed, spans, "packed", dtype), unsplit)


@pytest.mark.parametrize(
    "case",
    quick(
        [
            ("awq", "qwen3_moe"),
            ("gptq", "mixtral"),
            ("w4a16", "mixtral"),
            ("fp8-blocks", "qwen3_moe"),
            ("nvfp4", "qwen3_moe"),
        ],
        ("awq", "qwen3_moe"),
    ),
)
def test_experts_stay_packed_and_have_the_numbers_of_expanded_ones(tmp_path: Path, case: tuple[str, str]) -> None:
    """Gate and up of one expert, and then those of the next, are one tensor, though the files have them one by one."""
    packed, expanded = checkpoint_of(tmp_path, *case)
    model = load_span(packed, WHOLE, dtype=torch.float32, quantization="packed")
    held = [module for module in model.modules() if isinstance(module, PackedExperts)]
    plain: list[Any] = list(filter(are_usual, load_span(expanded, WHOLE, dtype=torch.float32).modules()))
    assert held
    for experts, reference in zip(held, plain, strict=True):
        for attribute in EXPERT_WEIGHTS:
            weights, expected = getattr(experts, attribute), getattr(reference, attribute)
            assert isinstance(weights, PackedExpertWeights)
            found = torch.stack([weights.matrix(expert, torch.float32) for expert in range(len(expected))])
            torch.testing.assert_close(found, expected.data, rtol=1e-6, atol=1e-6)
    unsplit = logits(packed, [WHOLE], "packed")
    torch.testing.assert_close(unsplit, logits(expanded, [WHOLE], "none"), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(packed, SPLITS[1], "packed"), unsplit)
    assert weight_types(packed, "packed")[1] == []


@pytest.mark.kind
def test_the_experts_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    packed, expanded = (
        Checkpoint.from_pretrained(str(folder)) for folder in make_packed_checkpoint("gpt_oss", tmp_path, mxfp4())
    )
    model = load_span(packed, WHOLE, dtype=torch.float32, quantization="packed")
    held = [module for module in model.modules() if isinstance(module, PackedExperts)]
    plain: list[Any] = list(filter(have_neighbours, load_span(expanded, WHOLE, dtype=torch.float32).modules()))
    for experts, reference in zip(held, plain, strict=True):
        for attribute in EXPERT_WEIGHTS:
            weights, expected = getattr(experts, attribute), getattr(reference, attribute).data.transpose(1, 2)
            found = torch.stack([weights.matrix(expert, torch.float32) for expert in range(len(expected))])
            assert torch.equal(found, expected)
            # A number takes four bits, and 32 numbers have a scale of eight, in memory as in the file.
            assert weights.panels.nbytes * 8 == expected.numel() * (4 + 8 / 32)
    unsplit = logits(packed, [WHOLE], "packed")
    torch.testing.assert_close(unsplit, logits(expanded, [WHOLE], "none"), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(packed, SPLITS[1], "packed"), unsplit)
    assert weight_types(packed, "packed") == (["mxfp4"], [])


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "w4a16"])
def test_a_span_takes_the_memory_of_its_packed_weights(tmp_path: Path, name: str) -> None:
    packed, expanded = checkpoint_of(tmp_path, name, with_head=True)
    model = load_span(packed, WHOLE, dtype=torch.float32, quantization="packed")
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(linears) == 4 * 7
    assert model.nbytes < load_span(expanded, WHOLE, dtype=torch.float32).nbytes / 5
    before = model.nbytes
    model.make_fused(products="library")
    assert model.fused is not None
    # Joined layers share an order.
    assert model.nbytes == before if name != "gptq-act-order" else model.nbytes < before
    # Speed is measured with a block that was not read. That it has an order, or scales of float32, it cannot know.
    made = make_span(packed, Span(0, 1), dtype=torch.float32, quantization="packed").nbytes
    loaded = load_span(packed, Span(0, 1), dtype=torch.float32, quantization="packed").nbytes
    assert made == loaded if name == "awq" else 0.9 * loaded < made < loaded
    assert head_bytes(packed, torch.float32, "packed") < head_bytes(packed, torch.float32) / 5


def layer(name: str, num_rows: int, order: Tensor) -> PackedLinear:
    made = PackedLinear(NUM_COLUMNS, num_rows, LAYOUTS[name])
    made.panels, _ = random_numbers(name, num_rows)
    made.order = order
    return made


def test_inputs_come_in_the_order_of_the_columns_and_layers_of_one_order_are_joined() -> None:
    name = "U4 of 128, float16, zero points"
    order = torch.randperm(NUM_COLUMNS, generator=torch.Generator().manual_seed(5)).int()
    parts = [layer(name, num_rows, order.clone()) for num_rows in (48, 32)]
    rows = torch.randn(5, NUM_COLUMNS, generator=torch.Generator().manual_seed(6))
    expected = torch.cat([part(rows) for part in parts], dim=-1)
    weights = torch.empty(48, NUM_COLUMNS)
    weights[:, order] = random_numbers(name, 48)[1]
    torch.testing.assert_close(expected[:, :48], rows @ weights.T, rtol=1e-4, atol=1e-4)
    assert PackedLinear.can_join(parts)
    joint = PackedLinear.joined(parts)
    assert torch.equal(joint(rows), expected)
    assert not PackedLinear.can_join([parts[0], layer(name, 32, order.flip(0))])
    plain = PackedLinear(NUM_COLUMNS, 32, LAYOUTS[name])
    assert not PackedLinear.can_join([parts[0], plain])


def test_what_cannot_stay_packed_is_expanded_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each expert may have another order of inputs; and one of a model's several schemes may have three bits."""
    packed, expanded = checkpoint_of(tmp_path / "moe", "gptq-act-order", "qwen3_moe", plain=("k_proj",))
    with caplog.at_level(logging.INFO, "corolla.models.packed.choice"):
        model = load_span(packed, WHOLE, dtype=torch.float32, quantization="packed")
    (record,) = caplog.records
    assert record.message == "expanding weights that cannot stay packed"
    assert record.reason == "it has experts with an order of inputs"  # type: ignore[attr-defined]
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 4 * 3 + 3  # one block has no experts
    kept = [module for module in model.modules() if isinstance(module, PackedExpertWeights)]
    assert [weights.shape[2] for weights in kept] == [32] * 3, "one group has no order"
    torch.testing.assert_close(
        logits(packed, [WHOLE], "packed"), logits(expanded, [WHOLE], "none"), rtol=1e-4, atol=1e-4
    )
    assert weight_types(packed, "none") == ([], ["gptq"])
    dense, _ = checkpoint_of(tmp_path / "dense", "gptq")
    assert weight_format("float32", "packed", *weight_types(dense, "packed")) == "packed/fp32: gptq"
    three, plain = checkpoint_of(tmp_path / "three", "w3a16")
    assert weight_types(three, "packed") == ([], ["compressed-tensors"])
    assert weight_types(plain, "none") == ([], [])
