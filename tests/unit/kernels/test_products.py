"""Packed weights are the numbers that their types stand for, and products with them are those of float32."""

import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from corolla.kernels.layouts import LAYOUTS, PLAIN_BFLOAT16, PLAIN_FLOAT32
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import NARROW, WIDE, Kernel, kernel_of, plain_layout
from corolla.kernels.repacking import empty_matrices, lay_out, repack, unpack
from corolla.models.gguf.header import TYPES
from corolla.models.packed.modules import PackedEmbedding, PackedLinear
from tests.gpu_double import a_gpu

NUM_COLUMNS = 512
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
# Where a block of the file has numbers in float16.
HALVES = {
    "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip


def random_rows(name: str, num_rows: int, seed: int = 0) -> Tensor:
    """Rows of a file in which every bit may be set, but for those of the scales."""
    _, block_weights, block_bytes = TYPES[NUMBERS[name]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows, NUM_COLUMNS // block_weights, block_bytes), dtype=np.uint8)
    for offset in HALVES[name]:
        scales = (random.standard_normal((*blocks.shape[:2], 1)) / 64).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales.view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_rows, -1))


def packed(rows: Tensor, name: str) -> Tensor:
    return repack(lambda first, end: rows[first:end], len(rows), NUM_COLUMNS, LAYOUTS[name])


def expanded(rows: Tensor, name: str) -> Tensor:
    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(NUMBERS[name])))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_rows", [16, 100])
def test_every_bit_of_a_weight_is_that_of_the_package_gguf(name: str, num_rows: int) -> None:
    rows = random_rows(name, num_rows)
    panels = packed(rows, name)
    row_ids = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    found = kernel_of(LAYOUTS[name]).expand(row_ids, panels, NUM_COLUMNS)
    assert torch.equal(found, expanded(rows, name)[row_ids])
    assert torch.equal(unpack(panels, LAYOUTS[name], num_rows), expanded(rows, name))


@pytest.mark.parametrize("name", LAYOUTS)
def test_panels_take_the_memory_that_rows_take_in_the_file(name: str) -> None:
    rows = random_rows(name, 64)
    panels = packed(rows, name)
    assert panels.nbytes == LAYOUTS[name].num_bytes(64, NUM_COLUMNS)
    assert panels.nbytes <= 1.03 * rows.nbytes


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_expanded_weights(name: str, dtype: torch.dtype) -> None:
    rows = random_rows(name, 200)
    inputs = torch.randn(19, NUM_COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)
    product = kernel_of(LAYOUTS[name], dtype).multiply(inputs, packed(rows, name))[:, :200].double()
    weights = expanded(rows, name).double()
    error = (product - inputs.double() @ weights.T).abs()
    # A sum of so many numbers is rounded as often; in bfloat16 the weights may have been, too.
    rounding = NUM_COLUMNS * torch.finfo(torch.float32).eps + (torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 0)
    assert bool((error <= rounding * (inputs.double().abs() @ weights.abs().T)).all())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_gives_the_same_bits_alone_and_among_others(name: str, dtype: torch.dtype, num_threads: int) -> None:
    panels = packed(random_rows(name, 1000), name)
    inputs = torch.randn(37, NUM_COLUMNS, generator=torch.Generator().manual_seed(3)).to(dtype)
    kernel, before = kernel_of(LAYOUTS[name], dtype), torch.get_num_threads()
    expected = torch.cat([kernel.multiply(inputs[row : row + 1], panels) for row in range(37)])
    torch.set_num_threads(num_threads)
    try:
        for first, end in ((0, 37), (1, 3), (4, 11), (20, 36), (5, 14)):
            assert torch.equal(kernel.multiply(inputs[first:end], panels), expected[first:end])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_the_small_tiles_of_other_processors_give_the_same_bits(name: str) -> None:
    panels = packed(random_rows(name, 150), name)
    inputs = torch.randn(23, NUM_COLUMNS, generator=torch.Generator().manual_seed(4))
    expected = kernel_of(LAYOUTS[name]).multiply(inputs, panels)
    for tilings in (WIDE, NARROW):
        assert torch.equal(Kernel(LAYOUTS[name], tilings=tilings).multiply(inputs, panels), expected)


def test_rows_of_another_length_are_refused() -> None:
    panels = packed(random_rows("Q4_0", 32), "Q4_0")
    with pytest.raises(ValueError, match="do not fit"):
        kernel_of(LAYOUTS["Q4_0"]).multiply(torch.ones(1, NUM_COLUMNS + 32), panels)


def layer(rows: Tensor, name: str, bias: Tensor | None = None) -> PackedLinear:
    parameter = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    made = PackedLinear(NUM_COLUMNS, len(rows), LAYOUTS[name], parameter)
    made.panels = packed(rows, name)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_takes_and_gives_any_shape_and_type(dtype: torch.dtype) -> None:
    rows, bias = random_rows("Q5_1", 50), torch.randn(50, generator=torch.Generator().manual_seed(5))
    inputs = torch.randn(2, 3, NUM_COLUMNS, generator=torch.Generator().manual_seed(6)).to(dtype)
    product = layer(rows, "Q5_1", bias)(inputs)
    expected = inputs.float() @ expanded(rows, "Q5_1").T + bias
    assert product.dtype == dtype
    # bfloat16 rounds weights, too.
    torch.testing.assert_close(product.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=NUM_COLUMNS**0.5 / 512)


def test_joined_layers_are_one_and_hold_their_weights_once() -> None:
    sizes = (48, 16, 40)
    parts = [layer(random_rows("Q4_0", size, seed=size), "Q4_0", torch.full((size,), 1.0)) for size in sizes]
    inputs = torch.randn(5, NUM_COLUMNS, generator=torch.Generator().manual_seed(7))
    expected = torch.cat([part(inputs) for part in parts], dim=-1)
    assert PackedLinear.can_join(parts)
    joint = PackedLinear.joined(parts)
    assert torch.equal(joint(inputs), expected)
    assert torch.equal(torch.cat([part(inputs) for part in parts], dim=-1), expected)
    assert joint.panels is not None
    storages = {part.panels.untyped_storage().data_ptr() for part in parts if part.panels is not None}
    assert storages == {joint.panels.untyped_storage().data_ptr()}


def test_layers_of_two_types_or_of_broken_panels_are_not_joined() -> None:
    one, other, odd = (
        layer(random_rows(name, size), name) for name, size in (("Q4_0", 32), ("Q4_1", 32), ("Q4_0", 40))
    )
    assert not PackedLinear.can_join([one, other])
    assert not PackedLinear.can_join([odd, one])


def test_embeddings_refuse_ids_that_are_not_theirs() -> None:
    rows = random_rows("Q8_0", 40)
    table = PackedEmbedding(40, NUM_COLUMNS, LAYOUTS["Q8_0"], torch.float32, scale=0.5)
    table.panels = packed(rows, "Q8_0")
    found = table(torch.tensor([[0, 39], [LANES, LANES - 1]]))
    assert torch.equal(found[1, 0], expanded(rows, "Q8_0")[LANES] * 0.5)
    assert table(torch.tensor([], dtype=torch.int64)).shape == (0, NUM_COLUMNS)
    for row_id in (-1, 40):
        with pytest.raises(IndexError):
            table(torch.tensor([row_id]))


def test_embeddings_on_a_gpu_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ahead looks up ids that the device has yet to choose. There is no kernel here; the rows lie expanded."""
    rows = random_rows("Q8_0", 40)
    table = PackedEmbedding(40, NUM_COLUMNS, LAYOUTS["Q8_0"], torch.float32, scale=0.3)
    table.panels = packed(rows, "Q8_0")
    ids = torch.tensor([[3, 39], [0, 3]])
    expected, weights = table(ids), expanded(rows, "Q8_0")
    with a_gpu() as gpu, torch.inference_mode():
        there = gpu.put(weights)

        def expand_packed(_layout: object, row_ids: Tensor, _panels: Tensor, dtype: torch.dtype) -> Tensor:
            return there.index_select(0, row_ids).to(dtype)

        kernels = SimpleNamespace(expand_packed=expand_packed)
        monkeypatch.setitem(sys.modules, "corolla.kernels.triton.packed_launches", kernels)
        table.panels = gpu.put(table.panels)
        gpu_ids, strange_ids = gpu.put(ids), gpu.put(torch.tensor([-1, 5, 40]))
        found = table(gpu_ids)
        assert not gpu.waits
        strange = table(strange_ids)
        assert not gpu.waits
        assert torch.equal(gpu.numbers(found), expected)
        assert gpu.numbers(strange).isnan().all(dim=-1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_outputs, num_inputs", [(16, 2), (50, 70), (200, 512), (4096, 1024)])
def test_a_product_with_plain_weights_is_the_same_in_any_company(
    dtype: torch.dtype, num_outputs: int, num_inputs: int
) -> None:
    layout = plain_layout(dtype)
    if layout is None:
        pytest.skip("this processor has no instructions for such panels")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    rows = torch.randn(33, num_inputs, generator=generator).to(dtype)
    _, room = empty_matrices(2, num_outputs, num_inputs, layout)
    left: list[Tensor] = []
    panels = lay_out(weight, layout, room, left.append)
    assert panels is room
    assert torch.equal(torch.cat(left), weight)
    assert torch.equal(lay_out(weight, layout), panels)
    kernel = kernel_of(layout, dtype)
    product = kernel.multiply(rows, panels)[:, :num_outputs]
    error = (product.double() - rows.double() @ weight.double().T).abs()
    rounding = num_inputs * torch.finfo(torch.float32).eps
    assert bool((error <= rounding * (rows.double().abs() @ weight.double().abs().T)).all())
    for count in (1, 2, 3, 4, 5, 6, 7, 11):
        assert torch.equal(kernel.multiply(rows[:count], panels)[:, :num_outputs], product[:count])
    threads = torch.get_num_threads()
    try:
        for torch_threads in (1, 2, 3):
            torch.set_num_threads(torch_threads)
            assert torch.equal(kernel.multiply(rows, panels)[:, :num_outputs], product)
    finally:
        torch.set_num_threads(threads)


def test_plain_weights_are_laid_out_in_whole_blocks() -> None:
    assert lay_out(torch.ones(3, 5), PLAIN_FLOAT32).shape == (1, 5, 64)
    with pytest.raises(ValueError, match="not whole blocks"):
        lay_out(torch.ones(3, 5, dtype=torch.bfloat16), PLAIN_BFLOAT16)
