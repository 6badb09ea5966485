"""Quantises the weights of linear layers to int8 or int4.

Only weights are quantised; hidden states, the KV cache and the data between hops keep the model's dtype. A quantised
layer becomes a PackedLinear, like one of a packed checkpoint. Its numbers are those of torchao's weight-only formats.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Final, cast

import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout, Number, Scale, group_layout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import kernel_of
from corolla.kernels.repacking import Numbers, repack_numbers
from corolla.models.packed.modules import PackedExpertWeights, PackedLinear, refuse_device

INT4_GROUP_SIZE: Final = 32
# A model is quantised only if at least this share of its weights is in linear layers that can be quantised.
_LEAST_SHARE: Final = 0.5
_SCALES: Final[Mapping[torch.dtype, Scale]] = {
    torch.float16: Scale.FLOAT16, torch.bfloat16: Scale.BFLOAT16, torch.float32: Scale.FLOAT32,
}  # fmt: skip
_HALF_OF_INT8: Final = 127.5
_LARGEST_INT4: Final = 15
_LEAST_INT4_SCALE: Final = 1e-6


def quantizer(
    model: nn.Module, quantization: str, kept: Collection[str] = (), device: torch.device | None = None
) -> Callable[[nn.Module], None] | None:
    """Returns a function that quantises a module of `model`, not its submodules, in its place.

    So a model can be quantised layer by layer while it is read. None: nothing would be quantised, as with `"none"` and
    `"packed"`.

    `int8` is symmetric with one scale for each output channel. `int4` is asymmetric with a scale and a zero point for
    each group of 32 inputs. Layers whose number of inputs is not a multiple of 32 stay as they are.

    Args:
        model: the model in its final dtype; its weights need not be read yet.
        quantization: `"none"`, `"int8"`, `"int4"` or `"packed"`.
        kept: names, within their blocks, of layers that are not quantised, since other code reads their weights.
        device: the device on which layers are quantised; None: that of the model.

    Raises:
        StartupError: this machine has no compiled functions.
        SettingsError: the device has no kernels.
        CheckpointError: most of the model's weights are not in linear layers.
    """
    if quantization in ("none", PACKED):
        return None
    layers = _quantizable(model, quantization, kept)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if sum(layer.weight.numel() for layer, _ in layers.values()) < _LEAST_SHARE * num_weights:
        raise CheckpointError(
            f"Most weights of this model lie outside of linear layers that {quantization} can be applied to; serve it "
            "with COROLLA_QUANTIZATION=none."
        )
    first, _ = next(iter(layers.values()))
    device = device or first.weight.device
    refuse_device(quantization, device)
    for layout in {layout for _, layout in layers.values()} if device.type == "cpu" else ():
        kernel_of(layout, first.weight.dtype)
    paths = {id(layer): path for path, (layer, _) in layers.items()}

    def quantize_layer(module: nn.Module) -> None:
        if (path := paths.get(id(module))) is not None:
            model.set_submodule(path, packed(cast(nn.Linear, module), quantization))

    return quantize_layer


def _quantizable(model: nn.Module, quantization: str, kept: Collection[str]) -> dict[str, tuple[nn.Linear, Layout]]:
    return {
        path: (module, layout)
        for path, module in model.named_modules()
        if type(module) is nn.Linear and path.rpartition(".")[2] not in kept
        if (layout := layout_of(quantization, module.in_features, module.weight.dtype)) is not None
    }


def layout_of(quantization: str, num_inputs: int, dtype: torch.dtype) -> Layout | None:
    """The layout of a layer's quantised weights; None: they are not quantised, or no block divides the inputs."""
    if quantization == "int8":
        return group_layout(num_inputs, Scale.FLOAT32, number=Number.INT8)
    if quantization != "int4" or num_inputs % INT4_GROUP_SIZE:
        return None
    return group_layout(INT4_GROUP_SIZE, _SCALES[dtype], has_minimum=True)


def pack_empty(model: nn.Module, quantization: str, kept: Collection[str] = ()) -> None:
    """Packs a model without weights: layers that would be quantised, and packed layers, get panels.

    Args:
        model: the model on the meta device, in its final dtype.
        quantization: see `quantizer`.
        kept: see `quantizer`.
    """
    for path, (layer, layout) in _quantizable(model, quantization, kept).items():
        bias = cast(nn.Parameter | None, layer.bias)
        model.set_submodule(path, PackedLinear(layer.in_features, layer.out_features, layout, bias))
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedExpertWeights):
            shape = (-(-math.prod(module.shape[:-1]) // LANES), module.shape[-1] // module.layout.block_weights)
            module.panels = torch.empty(*shape, module.layout.block_bytes, dtype=torch.uint8, device="meta")


def packed(layer: nn.Linear, quantization: str) -> PackedLinear:
    """A layer with the quantised weights of `layer` as panels, on its device; `layout_of` must give its layout."""
    weight = layer.weight.detach()
    layout = cast(Layout, layout_of(quantization, layer.in_features, weight.dtype))
    read = (_int8 if quantization == "int8" else _int4)(weight, weight.shape[1] // layout.block_weights)
    made = PackedLinear(layer.in_features, layer.out_features, layout, cast(nn.Parameter | None, layer.bias))
    made.panels = repack_numbers(read, layer.out_features, layer.in_features, layout, weight.device)
    return made


def _int8(weight: Tensor, num_blocks: int) -> Callable[[int, int], Numbers]:
    scales = _scales(weight.abs().amax(dim=1, keepdim=True), _HALF_OF_INT8, torch.finfo(torch.float32).eps).float()

    def read(start: int, end: int) -> Numbers:
        codes = (weight[start:end].float() * (1.0 / scales[start:end])).round_().clamp_(-128, 127).to(torch.int8)
        return Numbers(codes.view(torch.uint8), scales[start:end].expand(-1, num_blocks))

    return read


def _int4(weight: Tensor, num_blocks: int) -> Callable[[int, int], Numbers]:
    least, largest = weight.view(-1, num_blocks, INT4_GROUP_SIZE).aminmax(dim=2)
    scales = _scales(largest - least, _LARGEST_INT4, _LEAST_INT4_SCALE)
    half = scales * ((_LARGEST_INT4 + 1) // 2)
    middles = least + half

    def read(start: int, end: int) -> Numbers:
        own = slice(start, end)
        groups = weight[own].view(end - start, num_blocks, INT4_GROUP_SIZE)
        codes = (groups - (middles[own] - half[own]).unsqueeze(2)) / scales[own].unsqueeze(2)
        return Numbers(
            codes.round_().clamp_(0, _LARGEST_INT4).to(torch.uint8).flatten(1), scales[own], minima=middles[own]
        )

    return read


def _scales(ranges: Tensor, num_steps: float, least: float) -> Tensor:
    """The scales by which `ranges` have so many steps, with the same bits on a CPU and a GPU.

    A GPU multiplies by the reciprocal of a number, which may round otherwise, but divides by a tensor. The number that
    int8 has the scale from is a tie of two codes, so another last bit would be another code.
    """
    return (ranges / ranges.new_full((), num_steps)).clamp(min=least)
