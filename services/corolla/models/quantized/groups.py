"""Integers of four or eight bits with a scale for each group of inputs, as in AWQ, GPTQ and compressed-tensors.

Kernels multiply by them without expanding them; see `corolla.kernels.layouts`. All tensors are on one device.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout, Number, Scale, group_layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.stored_tensors import Unfit

NUMBERS: Final[Mapping[int, Number]] = {4: Number.UINT4, 8: Number.INT8}
"""The types of numbers that can stay packed, by their bits."""
_SCALES: Final[Mapping[str, Scale]] = {"F16": Scale.FLOAT16, "BF16": Scale.BFLOAT16, "F32": Scale.FLOAT32}


def layout_of_groups(bits: int, group_size: int, num_inputs: int, scale: str = "F16", *, has_zeros: bool) -> Layout:
    """The layout in memory of a weight in which groups of inputs share a scale.

    Args:
        bits: the bits of a number; kernels need four or eight.
        group_size: how many inputs share a scale; 0: all of them.
        scale: safetensors' name of the type of scales.

    Raises:
        Unfit: no kernel multiplies by such weights.
    """
    if bits not in NUMBERS:
        raise Unfit(f"has {bits} bits")
    if scale not in _SCALES:
        raise Unfit(f"has scales of the type {scale}")
    group_size = group_size or num_inputs
    layout = group_layout(group_size, _SCALES[scale], has_zeros=has_zeros, number=NUMBERS[bits])
    if layout is None or num_inputs % group_size:
        raise Unfit(f"has groups of {group_size} of {num_inputs} inputs")
    return layout


def input_order(group_of_inputs: Tensor, group_size: int, num_groups: int) -> Tensor | None:
    """The inputs in the order of their groups, int32 `[in]`; None: they already have this order.

    Args:
        group_of_inputs: integers `[in]`, the group of each input, below `num_groups`.
        group_size: how many inputs each group must have.

    Raises:
        Unfit: a group has another size.
    """
    sizes = torch.bincount(group_of_inputs.flatten(), minlength=num_groups)
    if not bool((sizes == group_size).all()):
        raise Unfit(f"has groups that are not all of {group_size} inputs")
    order = group_of_inputs.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order.int()


def numbers_of_blocks(codes: Tensor, scales: Tensor, zeros: Tensor | None, layout: Layout) -> Numbers:
    """The numbers of rows for `repack_numbers`; the scale of a group is repeated for each block in it.

    Args:
        codes: uint8 `[R, in]`, in the order of `input_order`, or int32 `[R, in / 8]`; see `Numbers`.
        scales: `[R, groups]` in the layout's scale type.
        zeros: integers `[R, groups]`, the zero points; `layout.middle` is already subtracted, unlike in `codes`.
            None: there are no zero points.
    """
    if layout.bits == 8:
        codes = codes ^ layout.middle  # as int8
    num_inputs = codes.shape[1] * (1 if codes.dtype == torch.uint8 else 8)
    repeats = num_inputs // layout.block_weights // scales.shape[1]
    scales = scales.repeat_interleave(repeats, dim=1)
    return Numbers(codes, scales, zeros=None if zeros is None else zeros.to(torch.int8).repeat_interleave(repeats, 1))
