"""Integers of four bits that share scales in groups of inputs: what AWQ, GPTQ and compressed-tensors have in common.

Kernels multiply by them as they are; see `corolla.kernels.layouts`.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout, Scale, group_layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.parts import Unfit

BITS: Final = 4
MIDDLE: Final = 1 << (BITS - 1)
"""Numbers and zero points of kernels count from here."""
_SCALES: Final[Mapping[str, Scale]] = {"F16": Scale.FLOAT16, "BF16": Scale.BFLOAT16, "F32": Scale.FLOAT32}


def layout_of_groups(bits: int, group_size: int, num_inputs: int, scale: str = "F16", *, has_zeros: bool) -> Layout:
    """How such a weight lies in memory.

    Args:
        group_size: inputs that share a scale; 0: all of them.
        scale: the type of scales, as safetensors calls it.

    Raises:
        Unfit: no kernel multiplies by such weights.
    """
    if bits != BITS:
        raise Unfit(f"has {bits} bits")
    if scale not in _SCALES:
        raise Unfit(f"has scales of the type {scale}")
    group_size = group_size or num_inputs
    layout = group_layout(group_size, _SCALES[scale], has_zeros=has_zeros)
    if layout is None or num_inputs % group_size:
        raise Unfit(f"has groups of {group_size} of {num_inputs} inputs")
    return layout


def input_order(group_of_inputs: Tensor, group_size: int, num_groups: int) -> Tensor | None:
    """The inputs, those of a group next to each other, int32 `[in]`; None: they lie so.

    Args:
        group_of_inputs: `[in]`, each within the groups.

    Raises:
        Unfit: groups are not of one size.
    """
    sizes = torch.bincount(group_of_inputs.flatten(), minlength=num_groups)
    if not bool((sizes == group_size).all()):
        raise Unfit(f"has groups that are not all of {group_size} inputs")
    order = group_of_inputs.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order.int()


def numbers_of_blocks(codes: Tensor, scales: Tensor, zeros: Tensor | None, layout: Layout) -> Numbers:
    """Rows as a layout has them, whose blocks may be parts of groups.

    Args:
        codes: uint8 `[R, in]`, in the order of `input_order`.
        scales: `[R, groups]`.
        zeros: integers `[R, groups]` that count from `MIDDLE`, as `codes` do not; None: they are 0.
    """
    repeats = codes.shape[1] // layout.block_weights // scales.shape[1]
    scales = scales.repeat_interleave(repeats, dim=1)
    return Numbers(codes, scales, zeros=None if zeros is None else zeros.to(torch.int8).repeat_interleave(repeats, 1))
