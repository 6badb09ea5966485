"""Integers and floats of eight bits with a scale for each group of inputs.

Kernels multiply by them without expanding them; see `corolla.kernels.layouts`. All tensors are on one device.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.layouts import MOST_FLOAT_SCALE, Layout, Number, Scale, group_layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.stored_tensors import Unfit

_NUMBERS: Final[Mapping[str, Number]] = {
    "F8_E4M3": Number.E4M3, "F8_E5M2": Number.E5M2, "I8": Number.INT8
}  # fmt: skip
_NOT_FINITE: Final = {4: 0x7F, 5: 0x7C}
"""The bits that are all set in floats that are not finite, by the bits of the exponent."""


def layout_of_octets(
    dtype: str, scales: Tensor | None, columns: int, num_inputs: int, *, has_zeros: bool = False
) -> Layout:
    """The layout in memory of a weight of 8 bits. Scales are kept in float32.

    Args:
        dtype: safetensors' name of the numbers' type.
        scales: all scales, float32 of any shape; None: they are not known.
        columns: how many neighbouring columns share a scale; the last ones of a row may be fewer.
        has_zeros: whether there are zero points, which only integers may have.

    Raises:
        Unfit: no kernel multiplies by such weights.
    """
    if dtype not in _NUMBERS:
        raise Unfit(f"is of the type {dtype}")
    layout = group_layout(math.gcd(columns, num_inputs), Scale.FLOAT32, number=_NUMBERS[dtype], has_zeros=has_zeros)
    if layout is None:
        raise Unfit(f"has groups of {columns} of {num_inputs} inputs")
    if layout.is_float and scales is not None and not bool((scales.abs() < MOST_FLOAT_SCALE).all()):
        raise Unfit(f"has a scale that is not below {MOST_FLOAT_SCALE:.0f}")
    return layout


def numbers_of_octets(numbers: Tensor, scales: Tensor, layout: Layout, zeros: Tensor | None = None) -> Numbers:
    """The numbers of rows for `repack_numbers`.

    Args:
        numbers: int8, float8_e4m3fn or float8_e5m2 `[R, in]`.
        scales: float32 `[R, B]`, `[R, 1]` or `[1, 1]`; the scale of each block of the layout.
        zeros: int8 `[R, B]`, `[R, 1]` or `[1, 1]`, the zero point of each block; None: there are none.
    """
    codes = numbers.contiguous().view(torch.uint8)
    blocks = codes.view(len(codes), -1, layout.block_weights)
    of_blocks = scales.expand(blocks.shape[:2])
    if layout.is_float:
        # A kernel takes NaN for a number. The scale of its block becomes NaN instead, so that no product hides it.
        of_blocks = of_blocks.masked_fill(_has_byte(blocks, _NOT_FINITE[layout.exponent_bits]), torch.nan)
    return Numbers(codes, of_blocks, zeros=None if zeros is None else zeros.expand(blocks.shape[:2]))


def _has_byte(content: Tensor, bits: int) -> Tensor:
    """Returns True for each run of bytes, uint8 `[..., n]`, one of which has all of these bits set: bool `[...]`.

    Eight bytes are examined at once: where one is zero, 1 less of it borrows from the next (Mycroft 1987).
    """
    ones, highest = 0x0101010101010101, 0x80 * 0x0101010101010101 - (1 << 64)
    lacking = ~content.view(torch.int64) & bits * ones
    return (lacking - ones & ~lacking & highest).any(dim=-1)
