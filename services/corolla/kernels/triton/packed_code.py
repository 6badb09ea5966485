"""The kernels for packed weights, in Triton's language; they read the panels of `kernels.layouts` as they are.

A tile of weights is unpacked in registers: the codes of 32 columns become whole numbers in float32, and these become
weights by the arithmetic, and thus with the bits, of expanded weights. The weights are rounded to the rows' dtype and
multiplied as in `device_code`: the inner dimension is walked in one order and never split.
"""

import triton
import triton.language as tl

from corolla.kernels.layouts import UNIT
from corolla.kernels.llvm_text import LANES

_LANES = tl.constexpr(LANES)
_UNIT = tl.constexpr(UNIT)
# A float32 with these bits, 2^23, holds a whole number in its lowest bits: GPUs convert integers far more slowly.
_WHOLE_BITS = tl.constexpr(0x4B000000)
_WHOLE = tl.constexpr(8388608.0)


@triton.jit
def multiply_packed(
    rows, words, halves, scales, numbers, bias, out, num_rows, num_outputs, num_blocks, layout: tl.constexpr,
    HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of `rows W^T + b`. Programs that follow each other share weights: GROUP tiles of rows at a time."""
    pid = tl.program_id(0)
    tiles_of_rows, tiles_of_outputs = tl.cdiv(num_rows, HEIGHT), tl.cdiv(num_outputs, WIDTH)
    first = (pid // (GROUP * tiles_of_outputs)) * GROUP
    group = tl.minimum(tiles_of_rows - first, GROUP)
    row = (first + (pid % (GROUP * tiles_of_outputs)) % group) * HEIGHT + tl.arange(0, HEIGHT)
    output = ((pid % (GROUP * tiles_of_outputs)) // group) * WIDTH + tl.arange(0, WIDTH)
    num_units = num_blocks * layout.units
    at = rows + (row % num_rows).to(tl.int64)[:, None] * (num_units * _UNIT) + tl.arange(0, COUNT * _UNIT)[None, :]
    # Outputs that are too many read a panel that is there; their sums are not stored.
    panel = ((output // _LANES) % tl.cdiv(num_outputs, _LANES)).to(tl.int64) * num_blocks * layout.block_bytes
    sums = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for unit in range(0, num_units, COUNT):
        weights = _weights(words, halves, scales, numbers, panel, output % _LANES, unit, layout, COUNT, WIDTH)
        values = tl.load(at)
        sums = tl.dot(values, weights.to(values.dtype), sums, input_precision=PRECISION)
        at += COUNT * _UNIT
    inside = (row[:, None] < num_rows) & (output[None, :] < num_outputs)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    there = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def expand_packed(
    row_ids, words, halves, scales, numbers, out, num_rows, num_blocks, layout: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """COUNT units of ROWS rows of the matrix."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(row_ids + place, mask=place < num_rows, other=0)
    first = tl.program_id(1) * COUNT
    panel = (row // _LANES) * num_blocks * layout.block_bytes
    weights = _weights(words, halves, scales, numbers, panel, row % _LANES, first, layout, COUNT, ROWS)
    column = first * _UNIT + tl.arange(0, COUNT * _UNIT)
    there = out + place.to(tl.int64)[None, :] * (num_blocks * layout.units * _UNIT) + column[:, None]
    tl.store(there, weights.to(out.dtype.element_ty), mask=(place < num_rows)[None, :])


@triton.jit
def _weights(
    words, halves, scales, numbers, panel, lane, first, layout: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The weights of COUNT units, from unit `first` on, of ROWS rows: float32 `[COUNT * 32, ROWS]`.

    `panel` `[ROWS]` is the first byte of each row's panel, and `lane` `[ROWS]` is the row's number within its panel.
    """
    lane = lane[None, :]
    unit = first + tl.arange(0, COUNT)
    block = panel[None, :] + ((unit // layout.units) * layout.block_bytes)[:, None]
    unit = (unit % layout.units)[:, None]
    weights = _numbers(words, numbers, block, unit, lane, layout, COUNT, ROWS)
    if layout.has_zeros:
        zero = _bytes(numbers + block + layout.minima_at + lane)
        weights -= _repeated(zero, COUNT, _UNIT, ROWS)
    scale = tl.load(scales + block // layout.scale.num_bytes + lane).to(tl.float32)
    if layout.has_sub_scales:
        PARTS: tl.constexpr = layout.scales_per_unit
        part = (tl.arange(0, PARTS) * _LANES)[None, :, None]
        at = (block + layout.sub_scales_at + unit * (PARTS * _LANES) + lane)[:, None, :] + part
        steps = tl.reshape(_bytes(numbers + at) * scale[:, None, :], (COUNT * PARTS, ROWS))
        weights *= _repeated(steps, COUNT * PARTS, _UNIT // PARTS, ROWS)
    else:
        weights *= _repeated(scale, COUNT, _UNIT, ROWS)
    if layout.has_minimum:
        minimum = tl.load(halves + (block + layout.minima_at) // 2 + lane).to(tl.float32)
        if layout.has_sub_scales:
            minimum *= -_bytes(numbers + block + layout.sub_minima_at + unit * _LANES + lane)
        weights += _repeated(minimum, COUNT, _UNIT, ROWS)
    return weights


@triton.jit
def _numbers(
    words, numbers, block, unit, lane, layout: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The whole numbers of units, float32 `[COUNT * 32, ROWS]`, less half of the range where they are centred."""
    if layout.bits == 8:
        column = (tl.arange(0, _UNIT) * _LANES)[None, :, None]
        at = (block + layout.low_at + unit * layout.low_bytes + lane)[:, None, :] + column
        found = tl.reshape(_bytes(numbers + at), (COUNT * _UNIT, ROWS))
    else:
        codes = _codes(words, block + layout.low_at + unit * layout.low_bytes, lane, 4, COUNT, ROWS)
        if layout.bits == 4:
            # A centred code of four bits is stored in two's complement, which has the highest bit the other way.
            codes = codes ^ (_WHOLE_BITS ^ (8 if layout.is_centred else 0))
        else:
            start = block + layout.high_at + unit * layout.high_bytes
            codes = codes | (_codes(words, start, lane, layout.high_bits, COUNT, ROWS) << 4) | _WHOLE_BITS
        middle = (1 << (layout.bits - 1)) if layout.is_centred else 0
        found = codes.to(tl.float32, bitcast=True) - (_WHOLE + middle)
    return found


@triton.jit
def _bytes(at):
    """Loads signed bytes, as whole numbers in float32.

    Where numbers of 8 bits reach a product through single operations, Triton gives each tensor core instruction other
    columns, and rounds other sums than the product of expanded weights. The sum of one number ends its search.
    """
    return tl.sum(tl.expand_dims(tl.load(at).to(tl.int32), 0), 0).to(tl.float32)


@triton.jit
def _codes(words, start, lane, BITS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Bits of units that lie together, BITS for each column, int32 `[COUNT * 32, ROWS]`.

    `start` `[COUNT, ROWS]` is the first byte of each unit's bits; a word has those of neighbouring columns of a row.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    NUM_WORDS: tl.constexpr = _UNIT // PER_WORD
    word = (tl.arange(0, NUM_WORDS) * _LANES)[None, :, None]
    loaded = tl.reshape(tl.load(words + ((start // 4 + lane)[:, None, :] + word)), (COUNT * NUM_WORDS, ROWS))
    shift = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
    return tl.reshape((loaded[:, None, :] >> shift) & ((1 << BITS) - 1), (COUNT * _UNIT, ROWS))


@triton.jit
def _repeated(values, COUNT: tl.constexpr, TIMES: tl.constexpr, ROWS: tl.constexpr):
    """Each of COUNT rows TIMES times: `[COUNT * TIMES, ROWS]` of `[COUNT, ROWS]`."""
    return tl.reshape(tl.broadcast_to(values[:, None, :], (COUNT, TIMES, ROWS)), (COUNT * TIMES, ROWS))
