"""Quantises the weights of linear layers to int8 or int4, by torchao.

Only weights are quantised; hidden states, the KV cache and the data between hops keep the model's dtype. On a CPU a
layer keeps its class and gets another kind of tensor as its weight, so the family's own code runs as before. On a GPU
with Triton the same numbers become panels, and the layer a PackedLinear, like one of a packed checkpoint.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, SettingsError, StartupError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout, Number, Scale, group_layout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.repacking import Numbers, repack_numbers
from corolla.kernels.triton.availability import missing
from corolla.models.packed.experts import PackedExpertWeights
from corolla.models.packed.modules import PackedLinear

INT4_GROUP_SIZE: Final = 32
# A model is quantised only if at least this share of its weights is in linear layers that can be quantised.
_LEAST_SHARE: Final = 0.5
_SCALES: Final[Mapping[torch.dtype, Scale]] = {
    torch.float16: Scale.FLOAT16, torch.bfloat16: Scale.BFLOAT16, torch.float32: Scale.FLOAT32,
}  # fmt: skip
_HALF_OF_INT8: Final = 127.5
_LARGEST_INT4: Final = 15
# torchao takes no smaller scale for int4 on CPUs.
_LEAST_INT4_SCALE: Final = 1e-6


def quantize(model: nn.Module, quantization: str, kept: Collection[str] = ()) -> None:
    """Quantises every linear layer of `model` in place, on its device; `"none"` and `"packed"` change nothing.

    `int8` is symmetric with one scale for each output channel. `int4` is asymmetric with a scale and a zero point for
    each group of 32 inputs; it skips layers whose number of inputs is not a multiple of 32.

    Args:
        model: the model in its final dtype, on its final device.
        quantization: `"none"`, `"int8"`, `"int4"` or `"packed"`.
        kept: names, within their blocks, of layers that are not quantised, since other code reads their weights.

    Raises:
        StartupError: torchao is not installed.
        SettingsError: the quantisation does not support this dtype on this device.
        CheckpointError: most of the model's weights are not in linear layers.
    """
    quantize_layer = quantizer(model, quantization, kept)
    if quantize_layer is not None:
        for module in list(model.modules()):
            quantize_layer(module)


def quantizer(
    model: nn.Module, quantization: str, kept: Collection[str] = (), device: torch.device | None = None
) -> Callable[[nn.Module], None] | None:
    """Returns a function that quantises a module of `model`, not its submodules, in its place, if `quantize` would.

    So a model can be quantised layer by layer while it is read. None: nothing would be quantised.

    Args:
        model: the model in its final dtype; its weights need not be read yet.
        device: the device on which layers are quantised; None: that of the model.

    Raises as `quantize` does.
    """
    if quantization in ("none", PACKED):
        return None
    modules = model.named_modules()
    layers = [each for path, each in modules if type(each) is nn.Linear and path.rpartition(".")[2] not in kept]
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    quantizable = [layer for layer in layers if layer.in_features % INT4_GROUP_SIZE == 0 or quantization == "int8"]
    if sum(layer.weight.numel() for layer in quantizable) < _LEAST_SHARE * num_weights:
        raise CheckpointError(
            f"Most weights of this model lie outside of linear layers that {quantization} can be applied to; serve it "
            "with COROLLA_QUANTIZATION=none."
        )
    first = quantizable[0].weight
    library, chosen = _torchao(), set(map(id, quantizable))
    if packs(device or first.device):
        return _packer(model, [each for each in quantizable if layout_of(quantization, each)], quantization)
    config = _config_of(quantization, first.dtype, device or first.device)

    def quantize_layer(module: nn.Module) -> None:
        if id(module) in chosen:
            library.quantize_(module, config, filter_fn=lambda each, _name: each is module)

    return quantize_layer


def packs(device: torch.device) -> bool:
    """Quantised weights become panels on a device of this kind."""
    return device.type == "cuda" and missing() is None


def layout_of(quantization: str, layer: nn.Linear) -> Layout | None:
    """The layout of a layer's quantised weights; None where no block of a layout divides its inputs."""
    if quantization == "int8":
        return group_layout(layer.in_features, Scale.FLOAT32, number=Number.INT8)
    if layer.in_features % INT4_GROUP_SIZE:
        return None
    return group_layout(INT4_GROUP_SIZE, _SCALES[layer.weight.dtype], has_minimum=True)


def _packer(model: nn.Module, layers: Collection[nn.Linear], quantization: str) -> Callable[[nn.Module], None]:
    places = {id(child): (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    chosen = set(map(id, layers))

    def pack_layer(module: nn.Module) -> None:
        if id(module) in chosen:
            parent, name = places[id(module)]
            setattr(parent, name, packed(cast(nn.Linear, module), quantization))

    return pack_layer


def pack_empty(model: nn.Module, quantization: str, kept: Collection[str] = ()) -> None:
    """Packs a model without weights as a GPU holds it: layers that would be quantised, and packed layers, get panels.

    Args:
        model: the model on the meta device, in its final dtype.
        quantization: see `quantize`.
        kept: see `quantize`.
    """
    for path, module in list(model.named_modules()):
        layer = module
        if quantization in ("int8", "int4") and type(module) is nn.Linear and path.rpartition(".")[2] not in kept:
            layout = layout_of(quantization, module)
            if layout is not None:
                bias = cast(nn.Parameter | None, module.bias)
                layer = PackedLinear(module.in_features, module.out_features, layout, bias)
                model.set_submodule(path, layer)
        if isinstance(layer, PackedLinear | PackedExpertWeights):
            shape = (-(-math.prod(layer.shape[:-1]) // LANES), layer.shape[-1] // layer.layout.block_weights)
            layer.panels = torch.empty(*shape, layer.layout.block_bytes, dtype=torch.uint8, device="meta")


def packed(layer: nn.Linear, quantization: str) -> PackedLinear:
    """A layer with the quantised weights of `layer` as panels, on its device; `layout_of` must give its layout."""
    weight, layout = layer.weight.detach(), cast(Layout, layout_of(quantization, layer))
    read = (_int8 if quantization == "int8" else _int4)(weight, weight.shape[1] // layout.block_weights)
    made = PackedLinear(layer.in_features, layer.out_features, layout, cast(nn.Parameter | None, layer.bias))
    made.panels = repack_numbers(read, layer.out_features, layer.in_features, layout, weight.device)
    return made


def _int8(weight: Tensor, num_blocks: int) -> Callable[[int, int], Numbers]:
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    scales = _scales(weight.abs().amax(dim=1, keepdim=True), _HALF_OF_INT8, torch.finfo(torch.float32).eps).float()
    codes: Tensor = Int8Tensor.from_hp(weight, PerRow(), scale=scales).qdata

    def read(start: int, end: int) -> Numbers:
        return Numbers(codes[start:end].view(torch.uint8), scales[start:end].expand(-1, num_blocks))

    return read


def _int4(weight: Tensor, num_blocks: int) -> Callable[[int, int], Numbers]:
    from torchao.quantization.quant_primitives import _quantize_affine_tinygemm

    least, largest = weight.view(-1, num_blocks, INT4_GROUP_SIZE).aminmax(dim=2)
    scales = _scales(largest - least, _LARGEST_INT4, _LEAST_INT4_SCALE)
    middles = least + scales * ((_LARGEST_INT4 + 1) // 2)
    codes = _quantize_affine_tinygemm(weight, [1, INT4_GROUP_SIZE], scales, middles, torch.int32, 0, _LARGEST_INT4)

    def read(start: int, end: int) -> Numbers:
        return Numbers(codes[start:end].to(torch.uint8), scales[start:end], minima=middles[start:end])

    return read


def _scales(ranges: Tensor, num_steps: float, least: float) -> Tensor:
    """The scales by which `ranges` have so many steps, with the bits of torchao's scales on a CPU.

    A GPU multiplies by the reciprocal of a number, which may round otherwise, but divides by a tensor. The number that
    int8 has the scale from is a tie of two codes, so another last bit would be another code.
    """
    return (ranges / ranges.new_full((), num_steps)).clamp(min=least)


def stored_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor of any shape, dtype and device takes in memory.

    `nbytes` of a quantised tensor is the size of the expanded one.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(stored_bytes(getattr(tensor, name)) for name in names)


def _config_of(quantization: str, dtype: torch.dtype, device: torch.device) -> Any:
    library = _torchao()
    if quantization == "int8":
        return library.Int8WeightOnlyConfig(set_inductor_config=False)
    if quantization != "int4":
        raise SettingsError(f"COROLLA_QUANTIZATION={quantization!r}: give none, int8, int4 or packed")
    if device.type == "cpu":
        # torchao has the layout of torch's int4 kernels for CPUs only in its prototype package.
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP_SIZE, set_inductor_config=False)
    if dtype != torch.bfloat16:
        raise SettingsError(f"COROLLA_QUANTIZATION=int4 on {device.type} needs COROLLA_DTYPE=bfloat16")
    return library.Int4WeightOnlyConfig(
        group_size=INT4_GROUP_SIZE, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )


def _torchao() -> Any:
    try:
        import torchao.quantization
    except ImportError as error:
        raise StartupError(
            "COROLLA_QUANTIZATION needs torchao; run `pip install torchao`, or set it to none."
        ) from error
    return torchao.quantization
