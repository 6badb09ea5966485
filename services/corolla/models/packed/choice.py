"""Decides which weights of a checkpoint stay packed, and reads them."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from corolla.chassis.errors import SettingsError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout
from corolla.kernels.triton.availability import missing
from corolla.models.checkpoint import Checkpoint
from corolla.models.gguf.header import PLAIN_TYPES
from corolla.models.packed.modules import fill_packed
from corolla.models.quantized.stored_tensors import Unfit
from corolla.models.quantized.tensors import PackedWeight, likely_layouts

log = logging.getLogger(__name__)

_METHODS: Final = ("awq", "compressed-tensors", "fp8", "gptq")


def layouts_of(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    quantization: str,
    device: torch.device,
    model: Callable[[], nn.Module],
    weights: Mapping[str, Any] | None = None,
) -> dict[str, Layout]:
    """The layouts of the weights that stay packed, by their names in the model; the other weights are expanded.

    Args:
        names: maps names in the model to names in the files.
        quantization: weights stay packed only if this is `packed`.
        device: where the model is computed.
        model: makes the model without weights, whose linear layers show which weights of safetensors can stay packed.
        weights: the tensors that `Checkpoint.open_tensors` yields; None: safetensors are not read, and the answer
            relies on config.json and the names of tensors.

    Raises:
        SettingsError: the checkpoint has no packed weights, or this device cannot multiply by them.
    """
    if quantization != PACKED:
        packed = [weight for weight in (weights or {}).values() if isinstance(weight, PackedWeight)]
        if packed:
            log.info("expanding weights while reading them", extra={"weights": len(packed), **_facts(packed[0])})
        return {}
    if checkpoint.gguf is None and (checkpoint.quantization is None or checkpoint.quantization.method not in _METHODS):
        raise SettingsError(
            f"COROLLA_QUANTIZATION={PACKED!r} is for GGUF files and for weights of {', '.join(_METHODS)}, and "
            f"{checkpoint.name} has none; set it to none, int8 or int4."
        )
    if device.type != "cpu" and (reason := missing() if device.type == "cuda" else "it has no kernels") is not None:
        raise SettingsError(
            f"COROLLA_QUANTIZATION={PACKED!r} does not work on {device.type}: {reason}. Set it to none, which expands "
            "the weights."
        )
    found: Mapping[str, Layout | None] = {}
    if checkpoint.gguf is not None:
        tensors = checkpoint.gguf.tensors
        found = {name: tensors.layout(stored) for name, stored in names.items()}
    elif weights is not None:
        found = _layouts_of_groups(weights, _linear_shapes(checkpoint, model()))
    elif checkpoint.quantization is not None:
        found = likely_layouts(checkpoint.quantization, names, _linear_shapes(checkpoint, model()))
    return {name: layout for name, layout in found.items() if layout is not None}


def types_of(
    checkpoint: Checkpoint, quantization: str, block_names: Mapping[str, str], block: Callable[[], nn.Module]
) -> tuple[list[str], list[str]]:
    """The formats of quantised weights: first those of weights that stay packed, then those of expanded weights.

    Args:
        block_names: for the largest block's tensors, maps names in the model to names in the files.
        block: makes that block without weights.
    """
    if checkpoint.gguf is None:
        if checkpoint.quantization is None:
            return [], []
        method = [checkpoint.quantization.method]
        if quantization != PACKED:
            return [], method
        shapes = _linear_shapes(checkpoint, block())
        layouts = likely_layouts(checkpoint.quantization, block_names, shapes).values()
        return method if any(layouts) else [], method if None in layouts else []
    tensors = checkpoint.gguf.tensors
    packed: set[str] = set()
    expanded: set[str] = set()
    for name in tensors:
        is_kept = quantization == PACKED and tensors.layout(name) is not None
        (packed if is_kept else expanded).update(tensor.type_name for tensor in tensors.stored(name))
    return sorted(packed), sorted(expanded - PLAIN_TYPES)


def fill(
    root: nn.Module,
    checkpoint: Checkpoint,
    layouts: Mapping[str, Layout],
    names: Mapping[str, str],
    weights: Mapping[str, Any],
) -> None:
    """Reads the weights of all packed layers.

    Args:
        root: the model, in which `replace_packed` has put packed layers.
        layouts: the result of `layouts_of` for these names and weights.
        names: maps names in the model to names in the files.
        weights: the tensors that `Checkpoint.open_tensors` yields.

    Raises:
        CheckpointError: the file cannot be read, or a weight has another shape.
    """
    if checkpoint.gguf is not None:
        fill_packed(root, {name: names[name] for name in layouts}, checkpoint.gguf.tensors.panels)
    else:
        fill_packed(root, {name: name for name in layouts}, lambda name, _shape: weights[name].panels())


def _layouts_of_groups(weights: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layout | None]:
    found: dict[str, Layout | None] = {}
    reasons: dict[str, list[str]] = {}
    for name, weight in weights.items():
        if isinstance(weight, PackedWeight):
            found[name] = None
            try:
                if shapes.get(name) != weight.shape:
                    raise Unfit("is not that of a linear layer that is only called")
                found[name] = weight.layout()
            except Unfit as unfit:
                reasons.setdefault(str(unfit), []).append(name)
    for reason, expanded in reasons.items():
        facts = {"weights": len(expanded), "first": expanded[0], "reason": f"it {reason}"}
        log.info("expanding weights that cannot stay packed", extra={**facts, **_facts(weights[expanded[0]])})
    return found


def _facts(weight: PackedWeight) -> dict[str, str]:
    return {"method": weight.method, "dtype": str(weight.dtype).removeprefix("torch.")}


def _linear_shapes(checkpoint: Checkpoint, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Maps the names of linear layers' weights to their shapes, without layers whose weights other code reads."""
    layers = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    kept = checkpoint.family.read_weights
    return {
        f"{path}.weight": tuple(module.weight.shape)
        for path, module in layers.items()
        if path.rpartition(".")[2] not in kept
    }
