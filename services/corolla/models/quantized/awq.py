"""AWQ in the layout "gemm", as AutoAWQ, transformers and vLLM write and read it.

Eight outputs share a word, in the order 0, 2, 4, 6, 1, 3, 5, 7: so the kernels that it was made for take numbers out.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from corolla.models.quantized.description import Quantization
from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.integers import unpacked
from corolla.models.quantized.parts import Parts, Unfit, allow, expect, shape_of

_BITS: Final = 4
_PER_WORD: Final = 32 // _BITS
# Where output 0, 1, ... of a word's outputs lies in it.
_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq:
    """A weight's parts: `qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]` and `scales`
    `[groups, out]`.
    """

    endings: Final = {".qweight": ".weight", ".qzeros": ".weight", ".scales": ".weight"}
    step: Final = _PER_WORD

    def __init__(self, quantization: Quantization) -> None:
        self._group_size = quantization.schemes[0].group_size

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """`[out, in]`. Raises Unfit."""
        allow(parts, "qweight", "qzeros", "scales")
        num_inputs, num_words = shape_of(parts, "qweight", {"I32"}, 2)
        num_outputs = num_words * _PER_WORD
        group_size = self._group_size or num_inputs
        if num_inputs % group_size:
            raise Unfit(f"has {num_inputs} inputs, which groups of {group_size} do not divide")
        expect(parts, "qzeros", {"I32"}, (num_inputs // group_size, num_words))
        expect(parts, "scales", FLOATS, (num_inputs // group_size, num_outputs))
        return num_outputs, num_inputs

    def rows(self, parts: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The weights of some outputs, float32 `[end - start, in]`."""
        words = slice(start // _PER_WORD, end // _PER_WORD)
        numbers = _in_order(parts["qweight"][:, words]).float()
        zeros = _in_order(parts["qzeros"][:, words]).float()
        scales = parts["scales"][:, start:end].float()
        num_groups = len(scales)
        grouped = numbers.view(num_groups, -1, end - start).sub_(zeros.unsqueeze(1)).mul_(scales.unsqueeze(1))
        return grouped.flatten(0, 1).T


def _in_order(words: Tensor) -> Tensor:
    """int32 `[R, W]` to uint8 `[R, 8 W]`."""
    numbers = unpacked(words, _BITS, words.shape[1] * _PER_WORD)
    return numbers.view(len(words), -1, _PER_WORD)[..., _PLACES].flatten(1)
