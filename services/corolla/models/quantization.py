"""Quantises the weights of linear layers to int8 or int4, by torchao.

Only weights are quantised; hidden states, the KV cache and the data between hops keep the model's dtype. A layer
keeps its class and gets another kind of tensor as its weight, so the family's own code runs as before.
"""

from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch import Tensor, nn

from corolla.chassis.errors import CheckpointError, SettingsError, StartupError
from corolla.chassis.weight_formats import PACKED

INT4_GROUP_SIZE: Final = 32
# A model is quantised only if at least this share of its weights is in linear layers that can be quantised.
_LEAST_SHARE: Final = 0.5


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
        for module in model.modules():
            quantize_layer(module)


def quantizer(
    model: nn.Module, quantization: str, kept: Collection[str] = (), device: torch.device | None = None
) -> Callable[[nn.Module], None] | None:
    """Returns a function that quantises a module of `model`, not its submodules, in place, if `quantize` would.

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
    config = _config_of(quantization, first.dtype, device or first.device)
    chosen = set(map(id, quantizable))
    library = _torchao()

    def quantize_layer(module: nn.Module) -> None:
        if id(module) in chosen:
            library.quantize_(module, config, filter_fn=lambda each, _name: each is module)

    return quantize_layer


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
            "COROLLA_QUANTIZATION needs torchao; run `pip install 'corolla[quantization]'`, or set it to none."
        ) from error
    return torchao.quantization
