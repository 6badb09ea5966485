"""Numbers and scales of eight bits, as in the OCP Microscaling Formats, and FP8 checkpoints.

Floats of eight bits (Micikevicius et al. 2022, "FP8 Formats for Deep Learning") have a scale for the whole weight, for
each output or, as in DeepSeek's models, each block. Kernels multiply by numbers of eight bits without expanding them;
see `corolla.kernels.layouts`. All tensors are on one device.
"""

import math
from collections.abc import Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout, Number, Scale, group_layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.format import Format
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, shape_of

FLOATS: Final = frozenset({"F16", "BF16", "F32", "F64"})
"""Types of ordinary weights and scales, by safetensors' names."""
FLOATS_OF_8_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2"})
SCALES: Final = FLOATS | FLOATS_OF_8_BITS | {"F8_E8M0", "U8"}
"""Types of scales; a U8 is an exponent, like an F8_E8M0."""


def nibbles(octets: Tensor) -> Tensor:
    """Splits the bytes `octets`, uint8 `[..., N]`, into halves, uint8 `[..., 2 N]`, the lower four bits first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def scale_numbers(scales: Tensor) -> Tensor:
    """The `scales`, of any shape, as float32; a uint8 `b` stands for 2 to the power of `b - 127`."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


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
    return with_scales(layout, scales)


def with_scales(layout: Layout, scales: Tensor | None) -> Layout:
    """A layout, if kernels can multiply by floats with these scales, float32 of any shape; None: they are not known."""
    if layout.is_float and scales is not None and not bool((scales.abs() < layout.most_scale).all()):
        raise Unfit(f"has a scale that is not below {layout.most_scale:.0f}")
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


_SCALES: Final = ("scale_inv", "weight_scale")


class Fp8(Format):
    """FP8 stores a weight as `weight` `[..., out, in]`, and `scale_inv` or `weight_scale`, which multiplies it."""

    endings: ClassVar[Mapping[str, str]] = {"_scale_inv": "", ".weight_scale": ".weight"}

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        """The shape `[..., out, in]`. Raises Unfit."""
        allow(stored, "weight", *_SCALES)
        shape = shape_of(stored, "weight", FLOATS_OF_8_BITS)
        named = [role for role in _SCALES if role in stored]
        if len(named) != 1 or not 2 <= len(shape) <= 3:
            raise Unfit("has no scales, or several" if len(named) != 1 else f"has the shape {list(shape)}")
        *outer, num_outputs, num_inputs = shape
        fitting = [(), (1,), (1,) * len(shape), (*outer, 1, 1), (*outer, num_outputs, 1)]
        fitting += [(num_outputs,)] if not outer else [tuple(outer)]
        if (block := self._schemes[0].block) is not None:
            high, wide = block
            fitting.append((*outer, -(-num_outputs // high), -(-num_inputs // wide)))
        expect(stored, named[0], SCALES, *fitting)
        return shape

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The entries `[start, end)` of the first dimension, outputs or experts, as float32. See `Format.rows`."""
        weight = tensors["weight"]
        scales = scale_numbers(next(tensors[role] for role in _SCALES if role in tensors))
        if scales.numel() == 1:
            return weight[start:end].float().mul_(scales.flatten())
        if weight.dim() == 3:
            return torch.stack([self._matrix(weight[each], scales[each], 0, None) for each in range(start, end)])
        return self._matrix(weight, scales, start, end)

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        block = self._schemes[0].block
        return layout_of_octets("F8_E4M3", None, num_inputs if block is None else block[1], num_inputs)

    def layout(self, stored: StoredTensors) -> Layout:
        if len(shape := stored["weight"].get_shape()) != 2:
            raise Unfit("is not a matrix")
        scales = scale_numbers(next(stored[role] for role in _SCALES if role in stored)[...])
        block = self._schemes[0].block
        columns = shape[1] if block is None or _is_of_outputs(scales, shape[0]) else block[1]
        return layout_of_octets(stored["weight"].get_dtype(), scales, columns, shape[1])

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        weight = tensors["weight"]
        scales = scale_numbers(next(tensors[role] for role in _SCALES if role in tensors))
        factors = self._factors(weight, scales, start, end, layout.block_weights)
        return numbers_of_octets(weight[start:end], factors, layout)

    def _matrix(self, weight: Tensor, scales: Tensor, start: int, end: int | None) -> Tensor:
        return weight[start:end].float().mul_(self._factors(weight, scales, start, end))

    def _factors(self, weight: Tensor, scales: Tensor, start: int, end: int | None, step: int = 1) -> Tensor:
        """The scales of some rows of a matrix, for each `step` inputs: `[R, in / step]`, `[R, 1]` or `[1, 1]`."""
        num_outputs, num_inputs = weight.shape
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        if _is_of_outputs(scales, num_outputs):
            return scales.view(-1, 1)[start:end]
        block, rows = self._schemes[0].block or (1, 1), range(num_outputs)[start:end]
        return spread(scales, block, rows, range(0, num_inputs, step))


def _is_of_outputs(scales: Tensor, num_outputs: int) -> bool:
    """There is one scale for all numbers, or one for each output."""
    return scales.numel() == 1 or scales.dim() == 1 or scales.shape == (num_outputs, 1)


def spread(scales: Tensor, block: tuple[int, int], rows: range, columns: range) -> Tensor:
    """The scale of each number in some rows and columns, `[rows, columns]` in the dtype and on the device of `scales`.

    `scales` are `[blocks of rows, blocks of columns]`.
    """
    high, wide = block
    # Scales are picked by index, since a file may claim blocks that are far larger than the weight.
    numbers = (torch.arange(each.start, each.stop, each.step, device=scales.device) for each in (rows, columns))
    of_rows, of_columns = next(numbers) // high, next(numbers) // wide
    return scales[of_rows][:, of_columns]
