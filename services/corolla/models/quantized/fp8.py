"""Floats of eight bits, with a scale for the whole weight, for each output or, as in DeepSeek's models, each block.

The numbers have the formats of Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
"""

from collections.abc import Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.floats import FLOATS_OF_8_BITS, SCALES, scale_numbers
from corolla.models.quantized.format import Format
from corolla.models.quantized.octets import layout_of_octets, numbers_of_octets
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, shape_of

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
