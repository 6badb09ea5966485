"""The memory layouts of weights that compiled functions multiply by: packed (quantised) weights, and plain ones.

A panel is sixteen rows of a matrix that are interleaved, so that one vector register holds a number of each row. A
panel has the bits of the file in another order, so no number is rounded again; its size differs by at most 3 %.

A panel is a list of blocks. A block of `block_weights` columns has these parts, each once for each of the 16 rows:

    scale         float16, or another type
    minimum       of the scale's type, where the type has one
    zero point    int8, where the type has one
    sub-scales    int8 or E4M3, one for each `sub_scale_weights` columns, where a block has several
    sub-minima    int8, one for each 32 columns, where a block has several and the type has minima
    low bits      for each 32 columns: four bits of each column, eight columns in an int32; a byte for types of 8 bits
    high bits     for each 32 columns: the fifth bit of each column in one int32, or the fifth and sixth bits in two

The idea of panels comes from BLAS (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication").
The packed types come from llama.cpp, whose file `ggml-common.h` defines them.

A block of plain weights is one column in float32, or two columns in bfloat16, which are adjacent for each row.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from corolla.kernels.llvm_text import LANES

UNIT: Final = 32
"""How many columns a unit has. The low bits of a unit lie together, and so do its high bits."""


E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of four bits in the order of their codes: a sign, two bits of the exponent, one of the fraction."""


class Scale(enum.Enum):
    """The type of scales, with LLVM's name. E8M0 is the exponent of a power of two (OCP Microscaling Formats)."""

    FLOAT16 = "half"
    BFLOAT16 = "bfloat"
    FLOAT32 = "float"
    E8M0 = "i8"

    @property
    def num_bytes(self) -> int:
        return {Scale.FLOAT32: 4, Scale.E8M0: 1}.get(self, 2)


class SubScale(enum.Enum):
    """The type of sub-scales, and whether a block's scale multiplies or divides them."""

    INT8 = "int8"
    E4M3 = "E4M3"
    E4M3_DIVIDED = "E4M3 divided"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the packed weights of one type.

    Attributes:
        name: the type's name in GGUF, or the name that `group_layout` makes.
        bits: the bits of a number: 4, 5, 6 or 8. Numbers of 4 bits may be floats; those of 8 bits are int8, or floats.
        is_centred: whether half of the range is subtracted from each number; int8 is centred.
        has_minimum: whether a minimum is added to each weight.
        block_weights: how many columns share a scale.
        sub_scale_weights: how many columns share a sub-scale, where a block has several; None: it has none.
        sub_scale: the type of sub-scales.
        scale: the type of scales.
        has_zeros: whether a zero point is subtracted from each number.
        exponent_bits: 0 for integers; the bits of the exponent of floats: 4 in E4M3, 5 in E5M2, 2 in E2M1, whose other
            bits are a sign and the fraction. These floats are finite, and scales are below `most_scale`.
    """

    name: str
    bits: int
    is_centred: bool
    has_minimum: bool
    block_weights: int = UNIT
    sub_scale_weights: int | None = None
    sub_scale: SubScale = SubScale.INT8
    scale: Scale = Scale.FLOAT16
    has_zeros: bool = False
    exponent_bits: int = 0

    @property
    def middle(self) -> int:
        """What is subtracted from each number, 0 unless it is centred."""
        return 1 << (self.bits - 1) if self.is_centred else 0

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0

    @property
    def float_factor(self) -> float:
        """A float is this factor times the float32 whose exponent ends, and whose fraction begins, with its own."""
        # The biases of both exponents differ by this power.
        return float(2.0 ** (128 - (1 << (self.exponent_bits - 1))))

    @property
    def most_scale(self) -> float:
        """The scales of floats are smaller, so that a kernel may multiply them by `float_factor` first."""
        return min(128.0, 2.0**128 / self.float_factor)

    @property
    def step(self) -> int:
        """How many columns are multiplied in one round of a loop."""
        return UNIT

    @property
    def has_float_sub_scales(self) -> bool:
        return self.sub_scale is not SubScale.INT8

    @property
    def divides(self) -> bool:
        """Whether sub-scales are divided by the block's scale."""
        return self.sub_scale is SubScale.E4M3_DIVIDED

    @property
    def has_sub_scales(self) -> bool:
        return self.sub_scale_weights is not None

    @property
    def units(self) -> int:
        """How many units a block has."""
        return self.block_weights // UNIT

    @property
    def scales_per_unit(self) -> int:
        return UNIT // (self.sub_scale_weights or UNIT)

    @property
    def high_bits(self) -> int:
        return 0 if self.bits == 8 else self.bits - 4

    @property
    def minima_at(self) -> int:
        """Offset of the minima, or of the zero points, within a block, in bytes."""
        return LANES * self.scale.num_bytes

    @property
    def sub_scales_at(self) -> int:
        return self.minima_at + LANES * (self.scale.num_bytes * self.has_minimum + self.has_zeros)

    @property
    def sub_minima_at(self) -> int:
        num_scales = self.units * self.scales_per_unit if self.has_sub_scales else 0
        return self.sub_scales_at + LANES * num_scales

    @property
    def low_at(self) -> int:
        num_minima = self.units if self.has_sub_scales and self.has_minimum else 0
        return self.sub_minima_at + LANES * num_minima

    @property
    def low_bytes(self) -> int:
        """Bytes of the low bits of a unit."""
        return LANES * UNIT * (8 if self.bits == 8 else 4) // 8

    @property
    def high_at(self) -> int:
        return self.low_at + self.units * self.low_bytes

    @property
    def high_bytes(self) -> int:
        """Bytes of the high bits of a unit."""
        return LANES * UNIT * self.high_bits // 8

    @property
    def block_bytes(self) -> int:
        return self.high_at + self.units * self.high_bytes

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes of the panels of a matrix."""
        return -(-num_rows // LANES) * (num_columns // self.block_weights) * self.block_bytes


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """The layout of weights that are not packed.

    Attributes:
        name: the type's name in GGUF.
        block_weights: how many neighbouring columns of a row lie next to each other in memory.
    """

    name: str
    block_weights: int

    @property
    def step(self) -> int:
        """How many columns are multiplied in one round of a loop: with more, the compiler runs out of registers."""
        return self.block_weights

    @property
    def block_bytes(self) -> int:
        return 4 * LANES


PLAIN_FLOAT32: Final = PlainLayout("F32", 1)
PLAIN_BFLOAT16: Final = PlainLayout("BF16", 2)

LAYOUTS: Final[Mapping[str, Layout]] = {
    layout.name: layout
    for layout in (
        Layout("Q4_0", 4, is_centred=True, has_minimum=False),
        Layout("Q4_1", 4, is_centred=False, has_minimum=True),
        Layout("Q5_0", 5, is_centred=True, has_minimum=False),
        Layout("Q5_1", 5, is_centred=False, has_minimum=True),
        Layout("Q8_0", 8, is_centred=True, has_minimum=False),
        Layout("Q4_K", 4, is_centred=False, has_minimum=True, block_weights=256, sub_scale_weights=32),
        Layout("Q5_K", 5, is_centred=False, has_minimum=True, block_weights=256, sub_scale_weights=32),
        Layout("Q6_K", 6, is_centred=True, has_minimum=False, block_weights=256, sub_scale_weights=16),
    )
}
"""The types of GGUF files that compiled functions multiply by without unpacking the whole matrix."""

_GROUP_BLOCKS: Final = (256, 128, 64, 32)


class Number(enum.Enum):
    """The type of numbers that groups of columns share a scale for, with its name in a layout's name."""

    UINT4 = "U4"
    E2M1 = "E2M1"
    INT8 = "I8"
    E4M3 = "E4M3"
    E5M2 = "E5M2"

    @property
    def exponent_bits(self) -> int:
        return {Number.E2M1: 2, Number.E4M3: 4, Number.E5M2: 5}.get(self, 0)


def group_layout(
    group_weights: int,
    scale: Scale,
    *,
    has_zeros: bool = False,
    has_minimum: bool = False,
    number: Number = Number.UINT4,
    sub_scale: tuple[int, SubScale] | None = None,
) -> Layout | None:
    """The layout of numbers with a scale for each group of columns; None: no block size divides a group.

    A block is a whole group or an equal part of one, so that few kernels serve all group sizes.

    Args:
        sub_scale: how many columns share a sub-scale, and its type; None: there are none.
    """
    block_weights = next((each for each in _GROUP_BLOCKS if group_weights % each == 0), None)
    if block_weights is None:
        return None
    parts = [scale.name.lower(), *["zero points"] * has_zeros, *["minima"] * has_minimum]
    columns, kind = sub_scale or (None, SubScale.INT8)
    if columns is not None:
        parts.append(f"{kind.value} of {columns}")
    return Layout(
        f"{number.value} of {block_weights}, {', '.join(parts)}", 4 if number in (Number.UINT4, Number.E2M1) else 8,
        is_centred=not number.exponent_bits, has_minimum=has_minimum, block_weights=block_weights, scale=scale,
        has_zeros=has_zeros, exponent_bits=number.exponent_bits, sub_scale_weights=columns, sub_scale=kind,
    )  # fmt: skip
