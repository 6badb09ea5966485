"""Floats of eight bits, with a scale for the whole weight, for each output or, as in DeepSeek's models, each block.

The formats of the numbers are those of Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.models.quantized.floats import FLOATS_OF_8_BITS, SCALES, scale_numbers
from corolla.models.quantized.format import Format
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

    def _matrix(self, weight: Tensor, scales: Tensor, start: int, end: int | None) -> Tensor:
        numbers = weight[start:end].float()
        if scales.numel() == 1:
            return numbers.mul_(scales.flatten())
        if scales.dim() == 1 or scales.shape == (len(weight), 1):
            return numbers.mul_(scales.view(-1, 1)[start:end])
        block, rows = self._schemes[0].block or (1, 1), range(start, start + len(numbers))
        return numbers.mul_(spread(scales, block, rows, weight.shape[1]))


def spread(scales: Tensor, block: tuple[int, int], rows: range, num_columns: int) -> Tensor:
    """The scale of each number of some rows, `[len(rows), num_columns]` in the dtype and on the device of `scales`.

    `scales` are `[blocks of rows, blocks of columns]`.
    """
    high, wide = block
    # Scales are picked by index, since a file may claim blocks that are far larger than the weight.
    of_rows = scales[torch.arange(rows.start, rows.stop) // high]
    return of_rows[:, torch.arange(num_columns) // wide]
