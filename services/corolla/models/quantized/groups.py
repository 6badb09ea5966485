"""Integers of few bits with a scale for each group of inputs: AWQ, GPTQ, and what they share with compressed-tensors.

AWQ (Lin et al. 2023) is read in the layout "gemm", which AutoAWQ, transformers and vLLM write: a word of 32 bits holds
eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ (Frantar et al. 2022) is read as AutoGPTQ and GPTQModel write
it: `qweight` packs several inputs into one word, `qzeros` several outputs; with activation order, the inputs of a group
are not adjacent, and `g_idx` is the group of each input.

Kernels multiply by integers of four or eight bits without expanding them; see `corolla.kernels.layouts`. All tensors
are on one device.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout, Number, Scale, group_layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.description import Scheme
from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.format import Format
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, need, shape_of

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


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that words hold.

    Args:
        words: int32 `[..., W]`.
        bits: the bits of a number, 1 to 8. Number `i` is the bits `[i * bits, (i + 1) * bits)` of its row's words, the
            least significant first; a number may begin in one word and end in the next.
        count: how many numbers a row has; `count * bits <= 32 W`.

    Returns:
        uint8 `[..., count]`, each below `2 ** bits`.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)[..., :count]
    if 8 % bits == 0:
        octets = words.contiguous().view(torch.uint8).unsqueeze(-1)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        numbers = (octets >> shifts).bitwise_and_(2**bits - 1)
        return numbers.flatten(-2)[..., :count]
    first_bits = torch.arange(count, device=words.device) * bits
    word, shift = first_bits // 32, first_bits % 32
    unsigned = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    numbers = (unsigned[..., word] >> shift).bitwise_or_(unsigned[..., word + 1] << (32 - shift))
    return numbers.bitwise_and_(2**bits - 1).to(torch.uint8)


def num_words(count: int, bits: int) -> int:
    """How many words `count` numbers take."""
    return -(-count * bits // 32)


def of_inputs(values: Tensor, group_size: int, groups: Tensor | None) -> Tensor:
    """The values of each input, `[R, in]` in their dtype, from those of groups, `[R, groups]`; `[R, 1]` stays as it is.

    `groups` are integers `[in]`, the group of each input; None: `group_size` neighbours are a group.
    """
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(group_size, dim=1) if groups is None else values[:, groups.long()]


_PARTS: Final = ("qweight", "qzeros", "scales")


class Gptq(Format):
    """GPTQ stores a weight as `qweight` int32 `[in * bits / 32, out]`, `qzeros` int32 `[groups, out * bits / 32]`,
    `scales` `[groups, out]`, and sometimes `g_idx` int32 `[in]`.
    """

    endings: ClassVar[Mapping[str, str]] = {f".{role}": ".weight" for role in (*_PARTS, "g_idx")}

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        allow(stored, *_PARTS, "g_idx")
        need(stored, *_PARTS)
        qweight, qzeros = (shape_of(stored, role, {"I32"}, 2) for role in ("qweight", "qzeros"))
        num_groups, num_outputs = scales = shape_of(stored, "scales", FLOATS, 2)
        _, num_inputs = self._scheme(qweight, qzeros, scales)
        if "g_idx" in stored:
            expect(stored, "g_idx", {"I32", "I64"}, (num_inputs,))
            groups = stored["g_idx"][...]
            if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
                raise Unfit(f"has a g_idx beyond its {num_groups} groups")
        return num_outputs, num_inputs

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        scheme, num_inputs = self._scheme(*(tuple(tensors[role].shape) for role in _PARTS))
        numbers = unpacked(self._words(tensors, start, end), scheme.bits, num_inputs).float()
        parts = self._zeros(tensors, scheme.bits, start, end), tensors["scales"][:, start:end].T
        zeros, scales = (of_inputs(each.float(), scheme.group_size, tensors.get("g_idx")) for each in parts)
        # The last group may have fewer inputs.
        return numbers.sub_(zeros[:, :num_inputs]).mul_(scales[:, :num_inputs])

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        return layout_of_groups(self._schemes[0].bits, self._schemes[0].group_size, num_inputs, has_zeros=True)

    def layout(self, stored: StoredTensors) -> Layout:
        shapes = [tuple(stored[role].get_shape()) for role in _PARTS]
        scheme, num_inputs = self._scheme(*shapes)
        dtype, num_groups = stored["scales"].get_dtype(), shapes[-1][0]
        layout = layout_of_groups(scheme.bits, scheme.group_size, num_inputs, dtype, has_zeros=True)
        if "g_idx" in stored:
            input_order(stored["g_idx"][...], num_inputs // num_groups, num_groups)
        return layout

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if "g_idx" not in tensors:
            return None
        num_groups = len(tensors["scales"])
        return input_order(tensors["g_idx"], len(tensors["g_idx"]) // num_groups, num_groups)

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        codes = self._words(tensors, start, end)
        if layout.bits != 4 or order is not None:
            codes = unpacked(codes, layout.bits, codes.shape[1] * 32 // layout.bits)
        zeros = self._zeros(tensors, layout.bits, start, end) - layout.middle
        codes = codes if order is None else codes[:, order]
        return numbers_of_blocks(codes, tensors["scales"][:, start:end].T, zeros, layout)

    def _words(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The packed numbers of some outputs, int32 `[R, in * bits / 32]`."""
        return tensors["qweight"][:, start:end].T

    def _zeros(self, tensors: Mapping[str, Tensor], bits: int, start: int, end: int) -> Tensor:
        """The zero points of some outputs, int32 `[R, groups]`."""
        zeros = unpacked(tensors["qzeros"], bits, tensors["scales"].shape[1])[:, start:end].T.int()
        if self._quantization.is_symmetric and bool((zeros == 1 << (bits - 1)).all()):
            return zeros  # some writers of symmetric numbers subtract nothing, whatever layout they name
        # The writer subtracted 1 with a wrap-around (0 became the largest number), so the sum wraps around, too.
        return zeros.add_(self._quantization.zero_offset).bitwise_and_(2**bits - 1)

    def _scheme(self, qweight: tuple[int, ...], qzeros: tuple[int, ...], scales: tuple[int, ...]) -> tuple[Scheme, int]:
        """The scheme that the shapes fit, and the number of inputs. Raises Unfit."""
        for scheme in self._schemes:
            num_inputs, rest = divmod(qweight[0] * 32, scheme.bits)
            num_groups = -(-num_inputs // (scheme.group_size or num_inputs))
            zeros = (num_groups, num_words(qweight[1], scheme.bits))
            if not rest and scales == (num_groups, qweight[1]) and qzeros == zeros:
                return scheme, num_inputs
        raise Unfit(
            f"has parts of the shapes {list(qweight)}, {list(qzeros)} and {list(scales)}, which fit none of the bits "
            "and groups that config.json names"
        )


_BITS: Final = 4
_PER_WORD: Final = 32 // _BITS
# The places of outputs 0, 1, ... within a word.
_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq(Gptq):
    """AWQ stores a weight as `qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]` and `scales`
    `[groups, out]`.
    """

    step = _PER_WORD

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        allow(stored, *_PARTS)
        num_inputs, num_words = shape_of(stored, "qweight", {"I32"}, 2)
        num_outputs = num_words * _PER_WORD
        group_size = self._schemes[0].group_size or num_inputs
        if num_inputs % group_size or num_inputs % _PER_WORD:
            raise Unfit(f"has {num_inputs} inputs, which groups of {group_size} do not divide")
        expect(stored, "qzeros", {"I32"}, (num_inputs // group_size, num_words))
        expect(stored, "scales", FLOATS, (num_inputs // group_size, num_outputs))
        return num_outputs, num_inputs

    def _words(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        return _turned(tensors["qweight"][:, start // _PER_WORD : end // _PER_WORD])

    def _zeros(self, tensors: Mapping[str, Tensor], bits: int, start: int, end: int) -> Tensor:
        words = tensors["qzeros"][:, start // _PER_WORD : end // _PER_WORD]
        numbers = unpacked(words, bits, words.shape[1] * _PER_WORD).view(len(words), -1, _PER_WORD)
        return numbers[..., _PLACES].flatten(1).T.int()

    def _scheme(self, qweight: tuple[int, ...], qzeros: tuple[int, ...], scales: tuple[int, ...]) -> tuple[Scheme, int]:
        return self._schemes[0], qweight[0]


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
