"""The kernel that multiplies few rows by numbers of four bits, two of which it unpacks at a time; in Triton's language.

It makes the weights in the rows' dtype, and they have the bits of `packed_code`'s: a number less its zero point is
exact, and its product with the scale is rounded once. A scale that has more bits than the dtype is the sum of two
parts, whose products a fused multiply-add rounds together. Rows that are not there are not read.

Triton cannot split a register into two weights without giving each instruction other columns (its `join` does so). So
a line of assembler makes both. The interpreter has no assembler, and computes the same numbers in float32.
"""

import triton
import triton.language as tl

from corolla.kernels.triton.availability import is_interpreted
from corolla.kernels.triton.packed_code import _LANES, _UNIT, _bytes, _mask, _repeated

# Where the table of `packed_launches` has the byte of a word that each column takes, and the turns of a word's halves.
_OF_COLUMNS = tl.constexpr(46)
_OF_HALVES = tl.constexpr(54)
_ONES = tl.constexpr(44)
_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit(do_not_specialize=["num_rows"])
def multiply_pairs(
    rows, words, scales, turns, bias, out, num_rows, num_outputs, num_blocks, layout: tl.constexpr,
    HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """One tile of `rows W^T + b` for up to HEIGHT rows; SIDE outputs of a thread lie side by side in memory."""
    natural = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    output = tl.reshape(_side_by_side(natural[None, :], 1, WIDTH, SIDE), (WIDTH,))
    row = tl.arange(0, HEIGHT)
    num_units = num_blocks * layout.units
    at = rows + row.to(tl.int64)[:, None] * (num_units * _UNIT) + tl.arange(0, COUNT * _UNIT)[None, :]
    # Outputs that are too many read a panel that is there; their sums are not stored.
    panel = (natural // _LANES) % tl.cdiv(num_outputs, _LANES)
    panel = panel.to(tl.int64) * num_blocks * layout.block_bytes
    sums = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for unit in range(0, num_units, COUNT):
        weights = _weights(rows, words, scales, turns, panel, natural % _LANES, unit, layout, COUNT, WIDTH, SIDE)
        values = tl.load(at, mask=row[:, None] < num_rows, other=0.0)
        sums = tl.dot(values, weights, sums)
        at += COUNT * _UNIT
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    inside = (row[:, None] < num_rows) & (output[None, :] < num_outputs)
    there = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _side_by_side(values, COUNT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr):
    """Puts each SIDE neighbours of `[COUNT, WIDTH]` into SIDE equal parts of the row, where one thread has them."""
    if SIDE > 1:
        parts = tl.reshape(values, (COUNT, WIDTH // SIDE, SIDE))
        values = tl.reshape(tl.permute(parts, (0, 2, 1)), (COUNT, WIDTH))
    return values


@triton.jit
def _weights(
    rows, words, scales, turns, panel, lane, first, layout: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The weights of COUNT units, from unit `first` on, in the dtype of rows: `[COUNT * 32, WIDTH]`.

    `panel` `[WIDTH]` is the first byte of each output's panel, and `lane` `[WIDTH]` is its number within the panel.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    unit = first + tl.arange(0, COUNT)
    block = panel[None, :] + ((unit // layout.units) * layout.block_bytes)[:, None]
    numbers = _numbers(rows, words, turns, block, (unit % layout.units)[:, None], lane, layout, COUNT, WIDTH, SIDE)
    lane = lane[None, :]
    # Loads of 16 bits would be one more size of loads, from which Triton derives a thread's columns.
    word = tl.load(words + (block // 4 + lane // 2))
    half = tl.load(turns + _OF_HALVES + lane % 2).to(tl.uint32, bitcast=True)
    scale = ((word.to(tl.uint32, bitcast=True) >> half) & 0xFFFF).to(tl.int16).to(scales.dtype.element_ty, bitcast=True)
    scale = _side_by_side(scale, COUNT, WIDTH, SIDE)
    LEAST: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) + layout.middle
    least = tl.full((COUNT, WIDTH), LEAST, tl.float32)
    if layout.has_zeros:
        least += _side_by_side(_bytes(words, turns, block + layout.minima_at, lane), COUNT, WIDTH, SIDE)
    if _INTERPRETED:
        numbers = numbers.to(tl.float32) - _repeated(least, COUNT, _UNIT, WIDTH)
        return (numbers * _repeated(scale.to(tl.float32), COUNT, _UNIT, WIDTH)).to(dtype)
    numbers -= _repeated(least.to(dtype), COUNT, _UNIT, WIDTH)
    none = tl.zeros((COUNT * _UNIT, WIDTH), dtype)
    if scale.dtype == dtype:
        return tl.fma(numbers, _repeated(scale, COUNT, _UNIT, WIDTH), none)
    # The first eight bits of a scale, and the last three: products of both with a number of five bits are exact.
    wide = scale.to(tl.float32)
    high = (wide.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    rest = tl.fma(numbers, _repeated(_first_half(wide - high, dtype), COUNT, _UNIT, WIDTH), none)
    return tl.fma(numbers, _repeated(_first_half(high, dtype), COUNT, _UNIT, WIDTH), rest)


@triton.jit
def _first_half(number, dtype: tl.constexpr):
    """Those bits of float32 that bfloat16 has, where the others are zero; conversions take many times as long."""
    return (number.to(tl.uint32, bitcast=True) >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _numbers(
    rows, words, turns, block, unit, lane, layout: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The codes plus a power of two whose float has them as its lowest bits: `[COUNT * 32, WIDTH]`."""
    dtype: tl.constexpr = rows.dtype.element_ty
    NUM_WORDS: tl.constexpr = COUNT * 4
    SHAPE: tl.constexpr = (COUNT * _UNIT, WIDTH)
    low = (block + layout.low_at + unit * layout.low_bytes) // 4 + lane[None, :]
    loaded = tl.load(words + (low[:, None, :] + (tl.arange(0, 4) * _LANES)[None, :, None]))
    word = _side_by_side(tl.reshape(loaded, (NUM_WORDS, WIDTH)), NUM_WORDS, WIDTH, SIDE)
    word = _repeated(word, NUM_WORDS, 8, WIDTH)
    FLIPPED: tl.constexpr = 8 if layout.is_centred else 0
    if _INTERPRETED:
        shift = tl.reshape(tl.broadcast_to((tl.arange(0, 8) * 4)[None, :], (NUM_WORDS, 8)), (COUNT * _UNIT, 1))
        codes = ((word >> shift) & 15) ^ FLIPPED
        return (codes + (128 if dtype == tl.bfloat16 else 1024)).to(tl.float32)
    byte = tl.load(turns + _OF_COLUMNS + tl.arange(0, 8))[None, :, None]
    byte = tl.reshape(tl.broadcast_to(byte, (NUM_WORDS, 8, WIDTH)), SHAPE)
    mask = tl.broadcast_to(_mask(turns, _ONES, 0x000F000F)[:, None], SHAPE)
    POWER: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
    power = tl.full(SHAPE, (POWER ^ FLIPPED) * 0x10001, tl.int32)
    # Two neighbouring columns of a thread have one word. The product puts the higher code of their byte 16 bits above
    # the lower one; the last instruction is `t & mask ^ power`.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, 0, $3; mul.lo.u32 t, t, 4097; lop3.b32 $0, t, $5, $7, 0x6a; }",
        "=r,r,r,r,r,r,r,r,r", [word, byte, mask, power], rows.dtype.element_ty, True, 2,
    )  # fmt: skip
