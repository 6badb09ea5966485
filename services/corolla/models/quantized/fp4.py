"""Floats of four bits (E2M1): MXFP4 of the OCP Microscaling Formats, as gpt-oss has it, and ModelOpt's NVFP4.

In MXFP4, 32 numbers share a power of two. In NVFP4, 16 numbers share a scale in E4M3, and these scales have a scale of
their own. Kernels multiply by such numbers without expanding them; see `corolla.kernels.layouts`.
"""

import math
from collections.abc import Collection, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.kernels.layouts import E2M1, Layout, Number, Scale, SubScale, group_layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.description import Quantization
from corolla.models.quantized.floats import Fp8, nibbles, scale_numbers, with_scales
from corolla.models.quantized.format import Format
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, shape_of

_OCTETS: Final = 16
NVFP4_GROUP: Final = 16
"""How many numbers of NVFP4 share a scale."""


def e2m1(octets: Tensor) -> Tensor:
    """Expands `octets` of two E2M1 numbers each, uint8 `[..., N]` on the CPU, to float32 `[..., 2 N]`."""
    return torch.tensor(E2M1)[nibbles(octets).int()]


def mxfp4_layout(num_inputs: int, scales: Tensor | None = None) -> Layout:
    """The layout in memory of a weight of MXFP4.

    Args:
        scales: all scales, uint8 or float8_e8m0fnu of any shape, on any device; None: they are not known.

    Raises:
        Unfit: no kernel multiplies by such weights.
    """
    largest = None if scales is None else scale_numbers(scales.view(torch.uint8).amax())
    return _layout(group_layout(math.gcd(num_inputs, 32), Scale.E8M0, number=Number.E2M1), num_inputs, largest)


def nvfp4_layout(
    num_inputs: int, sub_scale: SubScale, scales: Tensor | None = None, own: Tensor | None = None
) -> Layout:
    """The layout in memory of a weight of NVFP4.

    Args:
        sub_scale: whether `own` multiplies or divides the scales.
        scales: all scales, float8_e4m3fn of any shape, on any device; None: they are not known.
        own: the scale of the scales, `[1]` or `[]` in any float dtype on the same device; it comes with them.

    Raises:
        Unfit: no kernel multiplies by such weights.
    """
    largest = None
    if scales is not None and own is not None:
        most = (scales.view(torch.uint8) & 0x7F).amax().view(torch.float8_e4m3fn).float()
        largest = most / own.float() if sub_scale is SubScale.E4M3_DIVIDED else most * own.float()
    layout = group_layout(num_inputs, Scale.FLOAT32, number=Number.E2M1, sub_scale=(NVFP4_GROUP, sub_scale))
    return _layout(layout, num_inputs, largest)


def _layout(layout: Layout | None, num_inputs: int, largest: Tensor | None) -> Layout:
    if layout is None:
        raise Unfit(f"has {num_inputs} inputs, which blocks of 32 do not divide")
    return with_scales(layout, largest)


def fp4_numbers(octets: Tensor, scales: Tensor, layout: Layout, own: Tensor | None = None) -> Numbers:
    """The numbers of rows for `repack_numbers`.

    Args:
        octets: uint8 `[R, in / 2]` on any device; the first number of a byte is the lower half.
        scales: `[R, groups]` on the same device: uint8, float8_e8m0fnu or float8_e4m3fn.
        own: the scale of NVFP4's scales, `[1]` or `[]` in any float dtype there; None: the weight is of MXFP4.
    """
    words, octets_of_scales = octets.contiguous().view(torch.int32), scales.contiguous().view(torch.uint8)
    if own is None:
        return Numbers(words, octets_of_scales)
    of_blocks = own.float().reshape(1, 1).expand(len(words), words.shape[1] * 8 // layout.block_weights)
    return Numbers(words, of_blocks, sub_scales=octets_of_scales)


class Mxfp4(Format):
    """MXFP4 stores experts as `blocks` uint8 `[experts, out, groups, 16]`, `scales` uint8 `[experts, out, groups]`."""

    endings: ClassVar[Mapping[str, str]] = {"_blocks": "", "_scales": ""}

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        """The shape in the family's own code, `[experts, in, out]`. Raises Unfit."""
        allow(stored, "blocks", "scales")
        num_experts, num_outputs, num_groups, _ = shape = shape_of(stored, "blocks", {"U8"}, 4)
        expect(stored, "blocks", {"U8"}, (*shape[:3], _OCTETS))
        expect(stored, "scales", {"U8"}, shape[:3])
        return num_experts, num_groups * 2 * _OCTETS, num_outputs

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The weights of some experts, float32 `[end - start, in, out]`. See `Format.rows`."""
        scales = scale_numbers(tensors["scales"][start:end])
        return e2m1(tensors["blocks"][start:end]).mul_(scales.unsqueeze(-1)).flatten(2).transpose(1, 2)

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        return mxfp4_layout(num_inputs)

    def layout(self, stored: StoredTensors) -> Layout:
        return mxfp4_layout(2 * _OCTETS, stored["scales"][...])

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        num_experts, num_inputs, num_outputs = shape
        return num_experts * num_outputs, num_inputs

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        octets, scales = tensors["blocks"].flatten(2).flatten(0, 1), tensors["scales"].flatten(0, 1)
        return fp4_numbers(octets[start:end], scales[start:end], layout)


class Nvfp4(Format):
    """ModelOpt stores a weight of NVFP4 as `weight` uint8 `[out, in / 2]`, `weight_scale` E4M3 `[out, in / 16]` and
    `weight_scale_2` float32; the product of both scales multiplies the numbers. Other weights may be of FP8.
    """

    endings: ClassVar[Mapping[str, str]] = {".weight_scale": ".weight", ".weight_scale_2": ".weight"}

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(quantization)
        self._fp8 = Fp8(quantization)

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        if "weight_scale_2" not in stored:
            return self._fp8.shape(stored)
        num_outputs, num_octets = shape_of(stored, "weight", {"U8"}, 2)
        num_groups, rest = divmod(2 * num_octets, NVFP4_GROUP)
        if rest:
            raise Unfit(f"has {2 * num_octets} inputs, which groups of {NVFP4_GROUP} do not divide")
        expect(stored, "weight_scale", {"F8_E4M3"}, (num_outputs, num_groups))
        expect(stored, "weight_scale_2", {"F32"}, (), (1,))
        return num_outputs, 2 * num_octets

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        if (own := tensors.get("weight_scale_2")) is None:
            return self._fp8.rows(tensors, start, end)
        scales = tensors["weight_scale"][start:end].float() * own.reshape(())
        return e2m1(tensors["weight"][start:end]).mul_(scales.repeat_interleave(NVFP4_GROUP, dim=1))

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        if "weight_scale_2" not in roles:
            return self._fp8.likely_layout(roles, num_inputs)
        return nvfp4_layout(num_inputs, SubScale.E4M3)

    def layout(self, stored: StoredTensors) -> Layout:
        if "weight_scale_2" not in stored:
            return self._fp8.layout(stored)
        _, num_octets = stored["weight"].get_shape()
        parts = (stored[role][...] for role in ("weight_scale", "weight_scale_2"))
        return nvfp4_layout(2 * num_octets, SubScale.E4M3, *parts)

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        if (own := tensors.get("weight_scale_2")) is None:
            return self._fp8.numbers(tensors, start, end, layout, order)
        return fp4_numbers(tensors["weight"][start:end], tensors["weight_scale"][start:end], layout, own)
