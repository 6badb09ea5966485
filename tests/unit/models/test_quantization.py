"""Quantised spans take less memory, run the family's own code, and are refused for unsuitable families."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, SettingsError
from corolla.kernels.products import kernel_of
from corolla.models import quantization as quantization_module
from corolla.models.checkpoint import Checkpoint
from corolla.models.linear import is_plain
from corolla.models.packed.modules import PackedLinear
from corolla.models.quantization import packed, quantize, stored_bytes
from corolla.models.span_model import SpanModel, load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gpu_double import a_gpu


def load(folder: Path, quantization: str, dtype: torch.dtype = torch.float32, family: str = "llama") -> SpanModel:
    checkpoint = Checkpoint.from_pretrained(str(folder if folder.is_dir() else make_tiny_checkpoint(family, folder)))
    return load_span(checkpoint, Span(1, 3), dtype=dtype, quantization=quantization)


def weights_of(model: SpanModel) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization, bits", [("int8", 8), ("int4", 4)])
def test_weights_take_the_bytes_that_their_format_promises(
    tmp_path: Path, dtype: torch.dtype, quantization: str, bits: int
) -> None:
    plain, quantized = (load(tmp_path / "llama", each, dtype) for each in ("none", quantization))
    num_weights = sum(weight.numel() for weight in weights_of(plain))
    # Besides the codes, torchao keeps a float32 scale and an int8 zero point for each row, or both in the model's dtype
    # for each group of 32.
    num_rows = sum(weight.shape[0] for weight in weights_of(plain))
    scales = num_rows * 5 if quantization == "int8" else 2 * num_weights // 32 * dtype.itemsize
    codes_and_scales = num_weights * bits // 8 + scales
    assert sum(stored_bytes(weight) for weight in weights_of(quantized)) == codes_and_scales
    assert plain.nbytes - quantized.nbytes == num_weights * dtype.itemsize - codes_and_scales
    assert quantized.dtype == plain.dtype


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_every_weight_is_within_half_a_quantisation_step(quantization: str) -> None:
    layer = nn.Linear(96, 64, bias=False)
    weight = layer.weight.detach().clone()
    quantize(nn.Sequential(layer), quantization)
    given = layer(torch.eye(96)).t()
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
def test_quantised_layers_are_never_treated_as_plain_ones(tmp_path: Path, quantization: str) -> None:
    model = load(tmp_path / "llama", quantization)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert not any(is_plain(module) for module in linears)


def test_layers_whose_inputs_make_no_whole_groups_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(40, 64))
    quantize(model, "int4")
    assert [is_plain(module) for module in model] == [False, True]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_families_without_linear_layers_are_refused(tmp_path: Path, quantization: str) -> None:
    with pytest.raises(CheckpointError, match="COROLLA_QUANTIZATION"):
        load(tmp_path / "gpt2", quantization, family="gpt2")


def test_an_unknown_quantisation_is_refused_by_key_and_value() -> None:
    with pytest.raises(SettingsError, match="COROLLA_QUANTIZATION='int3'"):
        quantize(nn.Linear(32, 32), "int3")


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights become panels, as on a GPU."""
    monkeypatch.setattr(quantization_module, "packs", lambda _device: True)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_panels_have_the_weights_that_a_processor_multiplies_by(
    tmp_path: Path, dtype: torch.dtype, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = load(tmp_path / "llama", quantization, dtype)
    monkeypatch.undo()
    on_processor = load(tmp_path / "llama", quantization, dtype)
    layers = [each for each in packed.modules() if isinstance(each, PackedLinear)]
    modules = [each for each in on_processor.modules() if isinstance(each, nn.Linear)]
    assert len(layers) == 2 * 7
    for layer, module in zip(layers, modules, strict=True):
        assert layer.panels is not None
        rows = kernel_of(layer.layout).expand(torch.arange(layer.out_features), layer.panels, layer.in_features)
        # What a row of the identity gives, in the dtype of rows.
        given = module(torch.eye(layer.in_features, dtype=dtype)).t()
        tolerance = 2 * torch.finfo(dtype).eps * float(rows.abs().max())
        torch.testing.assert_close(rows.to(dtype), given, rtol=0, atol=tolerance)
    packed.make_fused("library")
    assert packed.fused is not None
    # Queries, keys and values are one product, and so are gate and up.
    assert [type(each) for each in packed.fused.layers[0].projections] == [PackedLinear] * 4


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


@pytest.mark.usefixtures("packing")
def test_layers_that_no_block_divides_are_not_packed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(40, 64))
    quantize(model, "int8")
    assert [type(each) for each in model] == [PackedLinear, nn.Linear]
    assert is_plain(model[1])
