"""Writes the lines of LLVM's text that turn the bits of a panel into numbers."""

from collections.abc import Iterator
from typing import Final

from corolla.kernels.compiler import processor_features
from corolla.kernels.layouts import E2M1, UNIT, Layout, PlainLayout, Scale
from corolla.kernels.llvm_text import FLOATS, INTS, LANES, Function

_BYTES: Final = f"<{LANES} x i8>"
_WORDS: Final = f"<{LANES} x i16>"
_HALVES: Final = f"<{LANES} x half>"
_PERMUTE: Final = "llvm.x86.avx512.permvar.sf.512"
HEAD_OF_PERMUTATIONS: Final = f"declare {FLOATS} @{_PERMUTE}({FLOATS}, {INTS})\n"
"""The declaration that modules with floats of four bits need where the processor has AVX-512."""
# Twice the sizes of the floats of four bits, four bits each, the first one lowest.
_DOUBLED: Final = sum(int(2 * size) << 4 * code for code, size in enumerate(E2M1[:8])) - (1 << 32)
# The bits of float32: those of 0.5, and the sign.
_HALF: Final = 0x3F000000
_SIGN: Final = "splat (i32 -2147483648)"


class _Unit:
    """Writes the unpacking of one unit, 32 columns of a panel, to float32.

    Args:
        function: the function that gets the lines.
        layout: the layout of the weights.
        block: LLVM's name of the block's address.
        unit: LLVM's name of the number of the unit within the block.
    """

    def __init__(self, function: Function, layout: Layout, block: str, unit: str) -> None:
        self._function = function
        self._layout = layout
        self._block = block
        self._unit = unit
        self._low = self._offset(layout.low_at, layout.low_bytes)
        self._high = self._offset(layout.high_at, layout.high_bytes) if layout.high_bits else ""

    def columns(self) -> Iterator[str]:
        """Yields the vector of each column, whose lines are written only then, so that few registers are in use."""
        layout, function = self._layout, self._function
        scales, minimum, zeros = self._scales(), "", ""
        if layout.has_zeros:
            zeros = self._signed_bytes(self._block, layout.minima_at)
        if layout.has_minimum:
            minimum = self._minimum()
        elif zeros and layout.scale is not Scale.FLOAT32:
            # The product of a zero point of 8 bits and a scale with 11 significant bits is exact, so the weight is
            # rounded at most once.
            minimum = function.let(f"fneg {FLOATS} {function.let(f'fmul {FLOATS} {zeros}, {scales[0]}')}")
        low = high = ""
        for column in range(UNIT):
            if layout.bits == 8:
                number = self._of_octets(function.load(_BYTES, self._low, LANES * column))
            else:
                if column % 8 == 0:
                    low = function.load(INTS, self._low, 4 * LANES * (column // 8))
                if layout.high_bits and column % (UNIT // layout.high_bits) == 0:
                    high = function.load(INTS, self._high, 4 * LANES * (column // (UNIT // layout.high_bits)))
                number = self._of_code(low, high, column)
            scale = scales[column // (layout.sub_scale_weights or UNIT)]
            if zeros and not minimum:
                number = function.let(f"fsub {FLOATS} {number}, {zeros}")
            if minimum and layout.scale is not Scale.FLOAT32:
                yield function.sum_of_product(number, scale, minimum)
                continue
            product = function.let(f"fmul {FLOATS} {number}, {scale}")
            # A product with a scale of float32 is rounded, as GPUs round it.
            yield function.let(f"fadd {FLOATS} {product}, {minimum}") if minimum else product

    def _offset(self, start: int, unit_bytes: int) -> str:
        return self._function.at(self._function.at(self._block, start), self._times(unit_bytes))

    def _times(self, factor: int) -> str | int:
        return self._function.let(f"mul i64 {self._unit}, {factor}") if self._layout.units > 1 else 0

    def _float(self, offset: int, stored: Scale = Scale.FLOAT16) -> str:
        function = self._function
        if stored is Scale.FLOAT32:
            return function.load(FLOATS, self._block, offset)
        if stored is Scale.E8M0:
            whole = function.let(f"zext {_BYTES} {function.load(_BYTES, self._block, offset)} to {INTS}")
            bits, least = function.let(f"shl {INTS} {whole}, splat (i32 23)"), "splat (i32 4194304)"
            # The least power of two is not a normal float32.
            is_least = function.let(f"icmp eq {INTS} {bits}, zeroinitializer")
            bits = function.let(f"select <{LANES} x i1> {is_least}, {INTS} {least}, {INTS} {bits}")
            return function.let(f"bitcast {INTS} {bits} to {FLOATS}")
        if stored is Scale.FLOAT16:
            return function.let(f"fpext {_HALVES} {function.load(_HALVES, self._block, offset)} to {FLOATS}")
        whole = function.let(f"zext {_WORDS} {function.load(_WORDS, self._block, offset)} to {INTS}")
        return function.let(f"bitcast {INTS} {function.let(f'shl {INTS} {whole}, splat (i32 16)')} to {FLOATS}")

    def _of_octets(self, octets: str) -> str:
        function, layout = self._function, self._layout
        if layout.is_float:
            return self._of_float(octets, layout.exponent_bits)
        return function.let(f"sitofp {INTS} {function.let(f'sext {_BYTES} {octets} to {INTS}')} to {FLOATS}")

    def _of_code(self, low: str, high: str, column: int) -> str:
        if self._layout.is_float:
            return self._of_half_octet(low, column)
        return self._function.let(f"sitofp {INTS} {self._code(low, high, column)} to {FLOATS}")

    def _of_half_octet(self, low: str, column: int) -> str:
        """Writes the conversion of floats of four bits by a table, which without AVX-512 has twice their sizes."""
        function, place = self._function, 4 * (column % 8)
        if processor_features().get("avx512f"):
            # The instruction looks at the lowest four bits of each code.
            codes = function.let(f"lshr {INTS} {low}, splat (i32 {place})")
            table = f"<{', '.join(f'float {number}' for number in E2M1)}>"
            return function.let(f"call {FLOATS} @{_PERMUTE}({FLOATS} {table}, {INTS} {codes})")
        turned = f"lshr {INTS} {low}, splat (i32 {place - 2})" if place else f"shl {INTS} {low}, splat (i32 2)"
        at = function.let(f"and {INTS} {function.let(turned)}, splat (i32 28)")
        size = function.let(f"and {INTS} {function.let(f'lshr {INTS} splat (i32 {_DOUBLED}), {at}')}, splat (i32 15)")
        sign = function.let(f"and {INTS} {function.let(f'shl {INTS} {low}, splat (i32 {28 - place})')}, {_SIGN}")
        half = function.let(f"bitcast {INTS} {function.let(f'or {INTS} {sign}, splat (i32 {_HALF})')} to {FLOATS}")
        return function.let(f"fmul {FLOATS} {function.let(f'sitofp {INTS} {size} to {FLOATS}')}, {half}")

    def _of_float(self, octets: str, exponent_bits: int) -> str:
        """Writes the conversion of floats: E5M2 is a half's first byte; E4M3 in a half's place is divided by 256."""
        function = self._function
        words = function.let(f"sext {_BYTES} {octets} to {_WORDS}")
        if exponent_bits == 5:
            words = function.let(f"shl {_WORDS} {words}, splat (i16 8)")
            halves = function.let(f"bitcast {_WORDS} {words} to {_HALVES}")
            return function.let(f"fpext {_HALVES} {halves} to {FLOATS}")
        size = function.let(f"and {_WORDS} {function.let(f'shl {_WORDS} {words}, splat (i16 7)')}, splat (i16 16256)")
        sign = function.let(f"and {_WORDS} {words}, splat (i16 -32768)")
        halves = function.let(f"bitcast {_WORDS} {function.let(f'or {_WORDS} {size}, {sign}')} to {_HALVES}")
        wide = function.let(f"fpext {_HALVES} {halves} to {FLOATS}")
        return function.let(f"fmul {FLOATS} {wide}, splat (float 256.0)")

    def _signed_bytes(self, base: str, offset: int) -> str:
        whole = self._function.let(f"sext {_BYTES} {self._function.load(_BYTES, base, offset)} to {INTS}")
        return self._function.let(f"sitofp {INTS} {whole} to {FLOATS}")

    def _scales(self) -> list[str]:
        layout, function = self._layout, self._function
        scale = self._float(0, layout.scale)
        if not layout.has_sub_scales:
            return [scale]
        base = self._offset(layout.sub_scales_at, LANES * layout.scales_per_unit)
        offsets = range(0, LANES * layout.scales_per_unit, LANES)
        if layout.has_float_sub_scales:
            subs = [self._of_float(function.load(_BYTES, base, offset), 4) for offset in offsets]
        else:
            subs = [self._signed_bytes(base, offset) for offset in offsets]
        return [function.let(f"{'fdiv' if layout.divides else 'fmul'} {FLOATS} {sub}, {scale}") for sub in subs]

    def _minimum(self) -> str:
        layout, function = self._layout, self._function
        minimum = self._float(layout.minima_at, layout.scale)
        if not layout.has_sub_scales:
            return minimum
        sub = self._signed_bytes(self._offset(layout.sub_minima_at, LANES), 0)
        return function.let(f"fneg {FLOATS} {function.let(f'fmul {FLOATS} {minimum}, {sub}')}")

    def _code(self, low: str, high: str, column: int) -> str:
        """Writes the extraction of a column's number from its four low bits and its high bits."""
        layout, function = self._layout, self._function
        shift = 4 * (column % 8)
        if layout.bits == 4 and layout.is_centred:
            shifted = function.let(f"shl {INTS} {low}, splat (i32 {28 - shift})")
            return function.let(f"ashr {INTS} {shifted}, splat (i32 28)")
        shifted = function.let(f"lshr {INTS} {low}, splat (i32 {shift})")
        code = function.let(f"and {INTS} {shifted}, splat (i32 15)")
        if layout.high_bits:
            place = column % (UNIT // layout.high_bits) * layout.high_bits - 4
            direction = f"lshr {INTS} {high}, splat (i32 {place})" if place >= 0 else (
                f"shl {INTS} {high}, splat (i32 {-place})"
            )  # fmt: skip
            mask = ((1 << layout.high_bits) - 1) << 4
            above = function.let(f"and {INTS} {function.let(direction)}, splat (i32 {mask})")
            code = function.let(f"or {INTS} {code}, {above}")
        if layout.is_centred:
            code = function.let(f"sub {INTS} {code}, splat (i32 {1 << (layout.bits - 1)})")
        return code


def columns(function: Function, layout: Layout | PlainLayout, panel: str, unit: str) -> Iterator[str]:
    """Yields `layout.step` columns of 16 rows as float32 vectors, whose lines are written only then.

    Args:
        function: the function that gets the lines.
        layout: the layout of the panel.
        panel: LLVM's name of the panel's address.
        unit: LLVM's name of the number of the round; a round has `layout.step` columns.
    """
    if isinstance(layout, PlainLayout):
        return _plain_columns(function, layout, panel, unit)
    if layout.units == 1:
        block = function.row(panel, unit, layout.block_bytes)
        return _Unit(function, layout, block, "").columns()
    number = function.let(f"udiv i64 {unit}, {layout.units}")
    block = function.row(panel, number, layout.block_bytes)
    return _Unit(function, layout, block, function.let(f"urem i64 {unit}, {layout.units}")).columns()


def _plain_columns(function: Function, layout: PlainLayout, panel: str, unit: str) -> Iterator[str]:
    part = panel_part(function, layout, panel, unit)
    if layout.block_weights == 1:
        yield function.load(FLOATS, part)
        return
    # The first of two numbers lies in the lower half of the word, since processors here are little-endian.
    both = function.load(INTS, part)
    for bits in (f"shl {INTS} {both}, splat (i32 16)", f"and {INTS} {both}, splat (i32 -65536)"):
        yield function.let(f"bitcast {INTS} {function.let(bits)} to {FLOATS}")


def panel_part(function: Function, layout: PlainLayout, panel: str, unit: str) -> str:
    """Writes the address of the columns of a round, in a plain panel."""
    return function.row(panel, unit, layout.block_bytes)
