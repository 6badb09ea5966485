"""Quantised spans take less memory, run the family's own code, and are refused for unsuitable families."""

import math
from pathlib import Path
from typing import Final

import pytest
import torch
import torchao.quantization
from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

from corolla.chassis.errors import CheckpointError
from corolla.kernels.products import kernel_of
from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import change_modules
from corolla.models.packed.modules import PackedLinear
from corolla.models.quantization import packed, quantizer
from corolla.models.span_model import SpanModel, load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gpu_double import a_gpu

TORCHAO: Final = {
    "int8": torchao.quantization.Int8WeightOnlyConfig(),
    "int4": PrototypeInt4WeightOnlyConfig(group_size=32),
}


def load(folder: Path, quantization: str, dtype: torch.dtype = torch.float32, family: str = "llama") -> SpanModel:
    checkpoint = Checkpoint.from_pretrained(str(folder if folder.is_dir() else make_tiny_checkpoint(family, folder)))
    return load_span(checkpoint, Span(1, 3), dtype=dtype, quantization=quantization)


def layers_of(model: SpanModel) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization, bits", [("int8", 8), ("int4", 4)])
def test_weights_take_the_bytes_that_their_format_promises(
    tmp_path: Path, dtype: torch.dtype, quantization: str, bits: int
) -> None:
    plain, quantized = (load(tmp_path / "llama", each, dtype) for each in ("none", quantization))
    layers = layers_of(quantized)
    num_weights = sum(math.prod(layer.shape) for layer in layers)
    # Besides the codes, there is a float32 scale for each block of a row, or a scale and a minimum in the model's dtype
    # for each group of 32.
    scales = sum(math.prod(layer.shape) // layer.layout.block_weights for layer in layers) * 4
    if quantization == "int4":
        scales = 2 * num_weights // 32 * dtype.itemsize
    assert plain.nbytes - quantized.nbytes == num_weights * dtype.itemsize - num_weights * bits // 8 - scales
    assert quantized.dtype == plain.dtype


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_weight_is_within_half_a_quantisation_step(quantization: str) -> None:
    layer = nn.Linear(96, 64, bias=False)
    weight = layer.weight.detach().clone()
    model = nn.Sequential(layer)
    change_modules(model, quantizer(model, quantization))
    given = model(torch.eye(96)).t()
    # int8: 255 symmetric steps for a row; int4: 15 from the smallest to the largest of a group.
    groups = weight.view(64, -1, 96 if quantization == "int8" else 32)
    if quantization == "int8":
        step = 2 * groups.abs().amax(dim=2, keepdim=True) / 255
    else:
        step = (groups.amax(dim=2, keepdim=True) - groups.amin(dim=2, keepdim=True)) / 15
    error = (given.view_as(groups) - groups).abs() / step
    assert 0.3 < float(error.max()) < 0.51


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_span_is_near_the_plain_one(tmp_path: Path, quantization: str) -> None:
    plain, quantized = (load(tmp_path / "llama", each) for each in ("none", quantization))
    hidden = torch.randn(1, 20, plain.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, given = plain(hidden), quantized(hidden)
    assert not torch.equal(given, expected)
    assert float(torch.cosine_similarity(given.flatten(), expected.flatten(), dim=0)) > 0.9


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_layers_that_no_block_divides_stay_as_they_are(quantization: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(40, 64))
    change_modules(model, quantizer(model, quantization))
    assert [type(each) for each in model] == [PackedLinear, nn.Linear]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_families_without_linear_layers_are_refused(tmp_path: Path, quantization: str) -> None:
    with pytest.raises(CheckpointError, match="COROLLA_QUANTIZATION"):
        load(tmp_path / "gpt2", quantization, family="gpt2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_numbers_are_those_of_torchao(tmp_path: Path, dtype: torch.dtype, quantization: str) -> None:
    plain, quantized = (load(tmp_path / "llama", each, dtype) for each in ("none", quantization))
    modules = [each for each in plain.modules() if isinstance(each, nn.Linear)]
    layers = layers_of(quantized)
    assert len(layers) == 2 * 7
    for layer, module in zip(layers, modules, strict=True):
        assert layer.panels is not None
        rows = kernel_of(layer.layout).expand(torch.arange(layer.out_features), layer.panels, layer.in_features)
        torchao.quantization.quantize_(module, TORCHAO[quantization])
        # What a row of the identity gives, in the dtype of rows.
        given = module(torch.eye(layer.in_features, dtype=dtype)).t()
        tolerance = 2 * torch.finfo(dtype).eps * float(rows.abs().max())
        torch.testing.assert_close(rows.to(dtype), given, rtol=0, atol=tolerance)


def test_quantised_projections_of_one_input_are_one_product(tmp_path: Path) -> None:
    model = load(tmp_path / "llama", "int8")
    model.make_fused()
    assert model.fused is not None
    # Queries, keys and values are one product, and so are gate and up.
    assert [type(each) for each in model.fused.layers[0].projections] == [PackedLinear] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_gpu_makes_the_panels_that_a_processor_makes(quantization: str, dtype: torch.dtype) -> None:
    layer = nn.Linear(256, 64, bias=False, dtype=dtype)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    # Numbers on a grid, some of which are ties of two codes.
    layer.weight.data.mul_(64).round_().div_(64)
    expected = packed(layer, quantization).panels
    with a_gpu() as gpu:
        layer.weight = nn.Parameter(gpu.put(layer.weight.detach()), requires_grad=False)
        found = packed(layer, quantization).panels
        assert found is not None
        assert expected is not None
        assert torch.equal(gpu.numbers(found), expected)
