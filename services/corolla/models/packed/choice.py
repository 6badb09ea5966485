"""Which weights of a checkpoint stay packed."""

from collections.abc import Mapping

import torch

from corolla.chassis.errors import SettingsError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout
from corolla.models.checkpoint import Checkpoint
from corolla.models.gguf.header import PLAIN_TYPES


def layouts_of(
    checkpoint: Checkpoint, names: Mapping[str, str], quantization: str, device: torch.device
) -> dict[str, Layout]:
    """The layouts of those weights that stay packed, by their names in the model; the others are expanded.

    Args:
        names: name in the model -> name in the files.
        quantization: none do unless it is `packed`.

    Raises:
        SettingsError: nothing is packed in this checkpoint, or nothing multiplies by packed weights on this device.
    """
    if quantization != PACKED:
        return {}
    if checkpoint.gguf is None:
        raise SettingsError(
            f"COROLLA_QUANTIZATION={PACKED!r} is for GGUF files, and {checkpoint.name} is none; set it to none, int8 "
            "or int4."
        )
    if device.type != "cpu":
        raise SettingsError(
            f"COROLLA_QUANTIZATION={PACKED!r} runs on processors only, not on {device.type}; set it to none, which "
            "expands the weights."
        )
    tensors = checkpoint.gguf.tensors
    found = {name: tensors.layout(stored) for name, stored in names.items()}
    return {name: layout for name, layout in found.items() if layout is not None}


def types_of(checkpoint: Checkpoint, quantization: str) -> tuple[list[str], list[str]]:
    """The formats of packed weights: those that stay so, and those of which some tensor is expanded."""
    if checkpoint.gguf is None:
        return [], [] if checkpoint.quantization is None else [checkpoint.quantization.method]
    tensors = checkpoint.gguf.tensors
    packed: set[str] = set()
    expanded: set[str] = set()
    for name in tensors:
        is_kept = quantization == PACKED and tensors.layout(name) is not None
        (packed if is_kept else expanded).update(tensor.type_name for tensor in tensors.stored(name))
    return sorted(packed), sorted(expanded - PLAIN_TYPES)
