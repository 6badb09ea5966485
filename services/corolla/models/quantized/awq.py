"""AWQ (Lin et al. 2023) in the layout "gemm", which AutoAWQ, transformers and vLLM write and read.

A word of 32 bits holds eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, which AutoAWQ's kernels need.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.format import Format
from corolla.models.quantized.groups import layout_of_groups, numbers_of_blocks
from corolla.models.quantized.integers import unpacked
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, shape_of

_BITS: Final = 4
_PER_WORD: Final = 32 // _BITS
# The places of outputs 0, 1, ... within a word.
_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq(Format):
    """AWQ stores a weight as `qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]` and `scales`
    `[groups, out]`.
    """

    endings: ClassVar[Mapping[str, str]] = {".qweight": ".weight", ".qzeros": ".weight", ".scales": ".weight"}
    step = _PER_WORD

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        allow(stored, "qweight", "qzeros", "scales")
        num_inputs, num_words = shape_of(stored, "qweight", {"I32"}, 2)
        num_outputs = num_words * _PER_WORD
        group_size = self._schemes[0].group_size or num_inputs
        if num_inputs % group_size:
            raise Unfit(f"has {num_inputs} inputs, which groups of {group_size} do not divide")
        expect(stored, "qzeros", {"I32"}, (num_inputs // group_size, num_words))
        expect(stored, "scales", FLOATS, (num_inputs // group_size, num_outputs))
        return num_outputs, num_inputs

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        words = slice(start // _PER_WORD, end // _PER_WORD)
        numbers = _in_order(tensors["qweight"][:, words]).float()
        zeros = _in_order(tensors["qzeros"][:, words]).float()
        scales = tensors["scales"][:, start:end].float()
        num_groups = len(scales)
        grouped = numbers.view(num_groups, -1, end - start).sub_(zeros.unsqueeze(1)).mul_(scales.unsqueeze(1))
        return grouped.flatten(0, 1).T

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        return layout_of_groups(_BITS, self._schemes[0].group_size, num_inputs, has_zeros=True)

    def layout(self, stored: StoredTensors) -> Layout:
        num_inputs, dtype = stored["qweight"].get_shape()[0], stored["scales"].get_dtype()
        return layout_of_groups(_BITS, self._schemes[0].group_size, num_inputs, dtype, has_zeros=True)

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        words = slice(start // _PER_WORD, end // _PER_WORD)
        zeros = _in_order(tensors["qzeros"][:, words]).T.to(torch.int8) - layout.middle
        return numbers_of_blocks(
            _turned(tensors["qweight"][:, words]), tensors["scales"][:, start:end].T, zeros, layout
        )


def _in_order(words: Tensor) -> Tensor:
    """Unpacks int32 `[R, W]` to uint8 `[R, 8 W]`, with the outputs in order."""
    numbers = unpacked(words, _BITS, words.shape[1] * _PER_WORD)
    return numbers.view(len(words), -1, _PER_WORD)[..., _PLACES].flatten(1)


def _turned(words: Tensor) -> Tensor:
    """Words of eight outputs, int32 `[in, out / 8]`, to words of eight inputs, int32 `[out, in / 8]`.

    Eight words are a square of 64 numbers. Two of its quarters change places, then two quarters of each quarter do, and
    then two of each of these.
    """
    num_inputs, num_words = words.shape
    squares = words.reshape(-1, _PER_WORD, num_words).clone()
    for half, low in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        upper, lower = squares.view(len(squares), -1, 2, half, num_words).unbind(2)
        differing = upper >> half * _BITS
        differing.bitwise_xor_(lower).bitwise_and_(low)
        lower.bitwise_xor_(differing)
        upper.bitwise_xor_(differing.bitwise_left_shift_(half * _BITS))
    return squares[:, _PLACES].permute(2, 1, 0).reshape(-1, num_inputs // _PER_WORD)
