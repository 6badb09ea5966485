"""Decides which weights of a checkpoint stay packed, and reads them."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from corolla.chassis.errors import SettingsError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout
from corolla.models.checkpoint import Checkpoint
from corolla.models.gguf.header import PLAIN_TYPES
from corolla.models.merged_experts import MergedPackedExperts, merged_names
from corolla.models.packed.modules import fill_packed, packable_weights, refuse_device
from corolla.models.quantized.description import Quantization
from corolla.models.quantized.stored_tensors import Unfit
from corolla.models.quantized.tensors import PackedWeight, likely_layouts, weight_names

log = logging.getLogger(__name__)

_PACKED_WEIGHT: Final = (PackedWeight, MergedPackedExperts)
_METHODS: Final = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4", "nvfp4")


def layouts_of(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    quantization: str,
    device: torch.device,
    model: Callable[[], PreTrainedModel],
    weights: Mapping[str, Any] | None = None,
) -> dict[str, Layout]:
    """The layouts of the weights that stay packed, by their names in the model; the other weights are expanded.

    Args:
        names: maps names in the model to names in the files.
        quantization: weights stay packed only if this is `packed`.
        device: where the model is computed.
        model: makes the model without weights, which shows which weights of safetensors can stay packed.
        weights: the tensors that `Checkpoint.open_tensors` yields, with merged experts; None: safetensors are not read,
            and the answer relies on config.json and the names of tensors.

    Raises:
        SettingsError: the checkpoint has no packed weights, or the device no kernels.
    """
    if quantization != PACKED:
        packed = [weight for weight in (weights or {}).values() if isinstance(weight, _PACKED_WEIGHT)]
        if packed:
            log.info("expanding weights while reading them", extra={"weights": len(packed), **_facts(packed[0])})
        return {}
    if checkpoint.gguf is None and (checkpoint.quantization is None or checkpoint.quantization.method not in _METHODS):
        raise SettingsError(
            f"COROLLA_QUANTIZATION={PACKED!r} is for GGUF files and for weights of {', '.join(_METHODS)}, and "
            f"{checkpoint.name} has none; set it to none, int8 or int4."
        )
    refuse_device(PACKED, device)
    found: Mapping[str, Layout | None] = {}
    if checkpoint.gguf is not None:
        tensors = checkpoint.gguf.tensors
        found = {name: tensors.layout(stored) for name, stored in names.items()}
    elif weights is not None:
        found = _layouts_of_groups(weights, _shapes(checkpoint, model()))
    elif checkpoint.quantization is not None:
        found = _likely_layouts(checkpoint, checkpoint.quantization, names, model())
    return {name: layout for name, layout in found.items() if layout is not None}


def types_of(
    checkpoint: Checkpoint, quantization: str, block_names: Mapping[str, str], block: Callable[[], PreTrainedModel]
) -> tuple[list[str], list[str]]:
    """The formats of quantised weights: first of weights that stay packed, then of expanded weights.

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
        layouts = _likely_layouts(checkpoint, checkpoint.quantization, block_names, block()).values()
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
    device: torch.device,
) -> None:
    """Reads the weights of all packed layers to a device, one after the other.

    Args:
        root: the model, in which `replace_packed` has put packed layers.
        layouts: the result of `layouts_of` for these names and weights.
        names: maps names in the model to names in the files.
        weights: the tensors that `Checkpoint.open_tensors` yields, with merged experts.
        device: where the model is computed.

    Raises:
        CheckpointError: the file cannot be read, or a weight has another shape.
    """
    if checkpoint.gguf is not None:
        fill_packed(root, {name: names[name] for name in layouts}, checkpoint.gguf.tensors.panels, device)
    else:
        fill_packed(root, {name: name for name in layouts}, lambda name, _shape, to: weights[name].panels(to), device)


def _layouts_of_groups(weights: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layout | None]:
    found: dict[str, Layout | None] = {}
    reasons: dict[str, list[str]] = {}
    for name, weight in weights.items():
        if isinstance(weight, _PACKED_WEIGHT):
            found[name] = None
            try:
                if shapes.get(name) != weight.shape:
                    raise Unfit("is not that of experts, or of a linear layer that is only called")
                found[name] = weight.layout()
            except Unfit as unfit:
                reasons.setdefault(str(unfit), []).append(name)
    for reason, expanded in reasons.items():
        facts = {"weights": len(expanded), "first": expanded[0], "reason": f"it {reason}"}
        log.info("expanding weights that cannot stay packed", extra={**facts, **_facts(weights[expanded[0]])})
    return found


def _likely_layouts(
    checkpoint: Checkpoint, quantization: Quantization, names: Collection[str], model: PreTrainedModel
) -> dict[str, Layout | None]:
    """What `likely_layouts` finds, with experts under the names and shapes that the model has for all of a layer."""
    shapes = _shapes(checkpoint, model)
    merged = merged_names(model, weight_names(quantization, names))
    for name, experts in merged.items():
        if (shape := shapes.get(name)) is not None:
            shapes |= {part: (shape[1] // len(parts), shape[2]) for parts in experts for part in parts}
    found = likely_layouts(quantization, names, shapes)
    for name, experts in merged.items():
        layouts = {found.pop(part) for parts in experts for part in parts if part in found}
        if layouts:
            found[name] = layouts.pop() if len(layouts) == 1 else None
    return found


def _facts(weight: PackedWeight | MergedPackedExperts) -> dict[str, str]:
    return {"method": weight.method, "dtype": str(weight.dtype).removeprefix("torch.")}


def _shapes(checkpoint: Checkpoint, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Maps the names of linear layers' and experts' weights to their shapes, without those that other code reads."""
    kept = checkpoint.family.read_weights
    embeddings = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return {
        name: shape
        for name, shape in packable_weights(model).items()
        if name not in embeddings and name.removesuffix(".weight").rpartition(".")[2] not in kept
    }
