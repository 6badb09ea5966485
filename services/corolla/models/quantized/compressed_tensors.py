"""compressed-tensors, as llm-compressor writes it: integers of one to eight bits, and floats of four or eight.

Activations keep their dtype, also if the checkpoint was made to be served with quantised activations (w8a8, fp8).
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout, SubScale
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.description import Scheme
from corolla.models.quantized.floats import (
    FLOATS,
    FLOATS_OF_8_BITS,
    SCALES,
    layout_of_octets,
    numbers_of_octets,
    scale_numbers,
    spread,
)
from corolla.models.quantized.format import Format
from corolla.models.quantized.fp4 import NVFP4_GROUP, e2m1, fp4_numbers, mxfp4_layout, nvfp4_layout
from corolla.models.quantized.groups import (
    NUMBERS,
    input_order,
    layout_of_groups,
    num_words,
    numbers_of_blocks,
    of_inputs,
    unpacked,
)
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, need, shape_of

_ROLES: Final = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"
)  # fmt: skip
_OCTETS: Final = FLOATS_OF_8_BITS | {"I8"}
# The schemes of floats of four bits: NVFP4, whose scales have a scale of their own, and MXFP4.
_NVFP4, _MXFP4 = Scheme(4, group_size=NVFP4_GROUP), Scheme(4, group_size=32)


class CompressedTensors(Format):
    """compressed-tensors stores a weight as several parts. One of these holds the numbers:

    - `weight_packed` int32, with `weight_shape`: integers of 1 to 8 bits;
    - `weight_packed` uint8 `[out, in / 2]`: floats of four bits;
    - `weight` `[out, in]`: integers or floats of eight bits.

    `weight_scale` has one scale for the whole weight, each output, each group of inputs, or each block. Integers may
    have a `weight_zero_point`, `weight_g_idx` is the group of each input, and `weight_global_scale` divides scales.
    """

    endings: ClassVar[Mapping[str, str]] = {f".{role}": ".weight" for role in _ROLES}

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        need(stored, "weight_scale")
        if "weight_packed" not in stored:
            shape = shape_of(stored, "weight", _OCTETS, 2)
            allow(stored, "weight", "weight_scale", "weight_zero_point", "weight_g_idx")
            scheme = self._scheme(stored, shape, self._schemes)
            if "weight_zero_point" in stored:
                expect(stored, "weight_zero_point", _OCTETS, tuple(stored["weight_scale"].get_shape()))
        elif stored["weight_packed"].get_dtype() == "U8":
            shape = _four_bit_shape(stored)
            scheme = _four_bit_scheme("weight_global_scale" in stored)
            self._scheme(stored, shape, [scheme])
        else:
            shape = _packed_shape(stored)
            _, packed_inputs = shape_of(stored, "weight_packed", {"I32"}, 2)
            scheme = self._scheme(stored, shape, self._packed_schemes(packed_inputs, shape[1]))
            self._check_packed_zeros(stored, shape, scheme)
        if "weight_g_idx" in stored:
            expect(stored, "weight_g_idx", {"I32", "I64"}, (shape[1],))
            groups, num_groups = stored["weight_g_idx"][...], stored["weight_scale"].get_shape()[-1]
            if not _is_unset(groups) and (int(groups.min()) < 0 or int(groups.max()) >= num_groups):
                raise Unfit(f"has a weight_g_idx beyond its {num_groups} groups")
        return shape

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        scales = tensors["weight_scale"]
        numbers, zeros, scheme = self._numbers(tensors, start, end)
        if scheme.block is not None:
            rows = range(start, end)
            if zeros is not None:
                numbers -= spread(zeros.float(), scheme.block, rows, range(numbers.shape[1]))
            return numbers.mul_(spread(scale_numbers(scales), scheme.block, rows, range(numbers.shape[1])))
        groups = tensors.get("weight_g_idx")
        if groups is not None and _is_unset(groups):
            groups = None
        if zeros is not None:
            numbers -= of_inputs(_of_outputs(zeros, start, end).float(), scheme.group_size, groups)
        factors = scale_numbers(_of_outputs(scales, start, end))
        if (global_scale := tensors.get("weight_global_scale")) is not None:
            factors = factors / global_scale.float()
        return numbers.mul_(of_inputs(factors, scheme.group_size, groups))

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        if "weight" in roles and (octets := next((each for each in self._schemes if each.bits == 8), None)):
            # The types of 8 bits have layouts of one size.
            return layout_of_octets("F8_E4M3", None, _columns(octets, num_inputs), num_inputs)
        scheme = next((each for each in self._schemes if each.bits in NUMBERS), None)
        if "weight_shape" not in roles:
            return _four_bit_layout(num_inputs, has_own="weight_global_scale" in roles)
        if scheme is None:
            raise Unfit("is not of integers of four or eight bits")
        has_zeros = "weight_zero_point" in roles
        return layout_of_groups(scheme.bits, scheme.group_size, num_inputs, has_zeros=has_zeros)

    def layout(self, stored: StoredTensors) -> Layout:
        if "weight" in stored:
            return self._layout_of_octets(stored)
        if stored["weight_packed"].get_dtype() == "U8":
            own, (_, num_inputs) = stored.get("weight_global_scale"), _four_bit_shape(stored)
            return _four_bit_layout(
                num_inputs, stored["weight_scale"][...], None if own is None else own[...], has_own=own is not None
            )
        shape = _packed_shape(stored)
        schemes = self._packed_schemes(stored["weight_packed"].get_shape()[1], shape[1])
        scheme = self._scheme(stored, shape, schemes)
        if scheme.block is not None:
            raise Unfit("has blocks")
        dtype, has_zeros = stored["weight_scale"].get_dtype(), "weight_zero_point" in stored
        layout = layout_of_groups(scheme.bits, scheme.group_size, shape[1], dtype, has_zeros=has_zeros)
        if "weight_g_idx" in stored:
            _input_order(stored["weight_g_idx"][...], stored["weight_scale"].get_shape())
        return layout

    def _layout_of_octets(self, stored: StoredTensors) -> Layout:
        if "weight_g_idx" in stored and not _is_unset(stored["weight_g_idx"][...]):
            raise Unfit("is of eight bits with an order of inputs")
        shape = tuple(stored["weight"].get_shape())
        columns = _columns(self._scheme(stored, shape, self._schemes), shape[1])
        scales = scale_numbers(stored["weight_scale"][...])
        has_zeros = "weight_zero_point" in stored
        if has_zeros and {stored[role].get_dtype() for role in ("weight", "weight_zero_point")} != {"I8"}:
            raise Unfit("is of floats of eight bits with zero points")
        return layout_of_octets(stored["weight"].get_dtype(), scales, columns, shape[1], has_zeros=has_zeros)

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if "weight" in tensors or "weight_g_idx" not in tensors:
            return None
        return _input_order(tensors["weight_g_idx"], tensors["weight_scale"].shape)

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        if "weight" in tensors:
            of_rows = functools.partial(self._of_rows, tensors, start, end, layout.block_weights)
            zeros = tensors.get("weight_zero_point")
            return numbers_of_octets(
                tensors["weight"][start:end], of_rows(scale_numbers(tensors["weight_scale"])), layout,
                None if zeros is None else of_rows(zeros),
            )  # fmt: skip
        codes = tensors["weight_packed"][start:end]
        if codes.dtype == torch.uint8:
            return fp4_numbers(codes, tensors["weight_scale"][start:end], layout, tensors.get("weight_global_scale"))
        num_outputs, num_inputs = (int(size) for size in tensors["weight_shape"])
        if layout.bits == 4 and order is None and num_inputs % 8 == 0:
            codes = codes[:, : num_inputs // 8]
        else:
            codes = unpacked(codes, layout.bits, num_inputs)
        zeros = self._zeros(tensors, layout.bits, num_outputs)
        return numbers_of_blocks(
            codes if order is None else codes[:, order],
            _of_outputs(tensors["weight_scale"], start, end).expand(end - start, -1),
            None if zeros is None else _of_outputs(zeros, start, end).expand(end - start, -1),
            layout,
        )

    def _of_rows(self, tensors: Mapping[str, Tensor], start: int, end: int, step: int, part: Tensor) -> Tensor:
        """The scales or zero points, `part`, of rows of eight bits, for each `step` inputs, or one for all of them."""
        shape = tuple(tensors["weight"].shape)
        scheme = _fitting(tuple(part.shape), shape, self._schemes)
        if scheme.block is not None:
            return spread(part, scheme.block, range(start, end), range(0, shape[1], step))
        return of_inputs(_of_outputs(part, start, end), scheme.group_size, None)[:, ::step]

    def _zeros(self, tensors: Mapping[str, Tensor], bits: int, num_outputs: int) -> Tensor | None:
        """The zero points of packed integers, in the shape of the scales, relative to the middle of the range."""
        zeros = tensors.get("weight_zero_point")
        if zeros is None or zeros.dtype != torch.int32:
            return zeros
        return unpacked(zeros.T, bits, num_outputs).T.to(torch.int8) - (1 << (bits - 1))

    def _numbers(self, tensors: Mapping[str, Tensor], start: int, end: int) -> tuple[Tensor, Tensor | None, Scheme]:
        """The numbers float32 `[end - start, in]`, the zero points in the shape of the scales, and the scheme."""
        scale_shape, zeros = tuple(tensors["weight_scale"].shape), tensors.get("weight_zero_point")
        if (packed := tensors.get("weight_packed")) is None:
            weight = tensors["weight"]
            return weight[start:end].float(), zeros, _fitting(scale_shape, tuple(weight.shape), self._schemes)
        if packed.dtype == torch.uint8:
            return e2m1(packed[start:end]), None, _four_bit_scheme("weight_global_scale" in tensors)
        num_outputs, num_inputs = (int(size) for size in tensors["weight_shape"])
        schemes = self._packed_schemes(packed.shape[1], num_inputs)
        scheme = _fitting(scale_shape, (num_outputs, num_inputs), schemes)
        # Stored integers are unsigned: the middle of the range was added to them.
        numbers = unpacked(packed[start:end], scheme.bits, num_inputs).float().sub_(1 << (scheme.bits - 1))
        return numbers, self._zeros(tensors, scheme.bits, num_outputs), scheme

    def _packed_schemes(self, num_packed: int, num_inputs: int) -> list[Scheme]:
        return [
            each for each in self._schemes if 1 <= each.bits <= 8 and num_words(num_inputs, each.bits) == num_packed
        ]

    def _scheme(self, stored: StoredTensors, shape: tuple[int, ...], schemes: Sequence[Scheme]) -> Scheme:
        return _fitting(shape_of(stored, "weight_scale", SCALES), shape, schemes)

    def _check_packed_zeros(self, stored: StoredTensors, shape: tuple[int, ...], scheme: Scheme) -> None:
        if "weight_zero_point" not in stored:
            return
        scales = tuple(stored["weight_scale"].get_shape())
        if stored["weight_zero_point"].get_dtype() == "I32":
            expect(
                stored, "weight_zero_point", {"I32"}, (num_words(shape[0], scheme.bits), scales[-1] if scales else 1)
            )
        else:
            expect(stored, "weight_zero_point", {"I8"}, scales)


def _columns(scheme: Scheme, num_inputs: int) -> int:
    """How many neighbouring inputs share a scale."""
    return scheme.block[1] if scheme.block is not None else scheme.group_size or num_inputs


def _packed_shape(stored: StoredTensors) -> tuple[int, ...]:
    """The weight's shape that `weight_shape` holds. Raises Unfit where the packed numbers do not fit it."""
    allow(stored, "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    num_outputs, num_packed = shape_of(stored, "weight_packed", {"I32"}, 2)
    expect(stored, "weight_shape", {"I32", "I64"}, (2,))
    shape = tuple(int(size) for size in stored["weight_shape"][...])
    if shape[0] != num_outputs or not 0 < shape[1] <= 32 * num_packed:
        raise Unfit(f"has a weight_shape of {list(shape)}, which does not fit its packed numbers")
    return shape


def _four_bit_shape(stored: StoredTensors) -> tuple[int, ...]:
    allow(stored, "weight_packed", "weight_scale", "weight_global_scale")
    num_outputs, num_octets = shape_of(stored, "weight_packed", {"U8"}, 2)
    if "weight_global_scale" in stored:
        expect(stored, "weight_global_scale", FLOATS, (), (1,))
    return num_outputs, 2 * num_octets


def _four_bit_layout(
    num_inputs: int, scales: Tensor | None = None, own: Tensor | None = None, *, has_own: bool
) -> Layout:
    """The layout of floats of four bits; `own` is the weight's `weight_global_scale`. Raises Unfit."""
    kinds = (torch.float8_e4m3fn,) if has_own else (torch.uint8, torch.float8_e8m0fnu)
    if scales is not None and scales.dtype not in kinds:
        raise Unfit(f"is of floats of four bits with scales of {scales.dtype}")
    if not has_own:
        return mxfp4_layout(num_inputs, scales)
    return nvfp4_layout(num_inputs, SubScale.E4M3_DIVIDED, scales, own)


def _four_bit_scheme(has_global_scale: bool) -> Scheme:
    return _NVFP4 if has_global_scale else _MXFP4


def _fitting(scales: tuple[int, ...], shape: tuple[int, ...], schemes: Sequence[Scheme]) -> Scheme:
    """The one scheme that a weight's scales fit. Raises Unfit."""
    fitting = {scheme for scheme in schemes if scales in _scale_shapes(scheme, shape)}
    if len(fitting) != 1:
        how_many = "several" if fitting else "none"
        raise Unfit(
            f"has the shape {list(shape)} and scales of the shape {list(scales)}, which fit {how_many} of the schemes "
            "that config.json names"
        )
    return fitting.pop()


def _scale_shapes(scheme: Scheme, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    num_outputs, num_inputs = shape
    if scheme.block is not None:
        high, wide = scheme.block
        yield -(-num_outputs // high), -(-num_inputs // wide)
    elif scheme.group_size:
        if num_inputs % scheme.group_size == 0:
            yield num_outputs, num_inputs // scheme.group_size
    else:
        yield from ((), (1,), (1, 1), (num_outputs,), (num_outputs, 1))


def _of_outputs(values: Tensor, start: int, end: int) -> Tensor:
    """The values of the outputs `[start, end)`, `[outputs, groups]`; `[1, 1]` where there is only one value."""
    if values.numel() == 1:
        return values.reshape(1, 1)
    return values[start:end].reshape(end - start, -1)


def _input_order(groups: Tensor, scales: Sequence[int]) -> Tensor | None:
    """The `input_order` of a weight with scales of this shape; None also if each output has one scale only."""
    if _is_unset(groups) or len(scales) < 2 or scales[1] == 1:
        return None
    return input_order(groups, len(groups) // scales[1], scales[1])


def _is_unset(groups: Tensor) -> bool:
    """Groups are in the order of inputs where compressed-tensors writes -1 everywhere."""
    return bool((groups == -1).all())
