"""The kernels for packed weights, in Triton's language; they read the panels of `kernels.layouts` as they are.

A tile of weights is unpacked in registers: the codes of 32 columns become numbers in float32, and these become weights
with the bits of expanded weights. The weights are rounded to the rows' dtype and multiplied as in `device_code`: the
inner dimension is walked in one order and never split.

Triton lets each thread unpack the very weights that its tensor core instruction takes, without a way through shared
memory, only if all that a weight depends on is loaded. So a table, `turns` (see `packed_launches`), has what depends on
columns and rows. All loads are of 16 bits or more: from smaller ones Triton would give each instruction other columns,
and other sums than the product of expanded weights.
"""

import triton
import triton.language as tl

from corolla.kernels.layouts import UNIT
from corolla.kernels.llvm_text import LANES

_LANES = tl.constexpr(LANES)
_QUADS = tl.constexpr(LANES // 4)
_UNIT = tl.constexpr(UNIT)
# Where the table has the turns of high bits, and of bytes that are numbers by themselves.
HIGH_TURNS, BYTE_TURNS = 8, 40
_ONES = tl.constexpr(44)
_HIGH = tl.constexpr(HIGH_TURNS)
_OF_BYTES = tl.constexpr(BYTE_TURNS)
# E4M3 is this factor times the float32 that ends, exponent and fraction, with its own.
_OF_E4M3 = tl.constexpr(2.0**120)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_packed(
    rows, words, scales, turns, bias, out, num_rows, num_outputs, num_blocks, layout: tl.constexpr,
    HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of `rows W^T + b`. Programs that follow each other share weights: GROUP tiles of rows at a time."""
    pid = tl.program_id(0)
    tiles_of_rows, tiles_of_outputs = tl.cdiv(num_rows, HEIGHT), tl.cdiv(num_outputs, WIDTH)
    first = (pid // (GROUP * tiles_of_outputs)) * GROUP
    group = tl.minimum(tiles_of_rows - first, GROUP)
    row = (first + (pid % (GROUP * tiles_of_outputs)) % group) * HEIGHT + tl.arange(0, HEIGHT)
    tile = (pid % (GROUP * tiles_of_outputs)) // group
    output = tile * WIDTH + tl.arange(0, WIDTH)
    at = rows + (row % num_rows).to(tl.int64)[:, None] * (num_blocks * layout.units * _UNIT)
    sums = sums_of_tile(
        at, words, scales, turns, 0, tl.cdiv(num_outputs, _LANES), tile, num_blocks, layout,
        COUNT, HEIGHT, WIDTH, PRECISION,
    )  # fmt: skip
    inside = (row[:, None] < num_rows) & (output[None, :] < num_outputs)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[None, :]
    there = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(there, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sums_of_tile(
    at, words, scales, turns, first_panel, num_panels, tile, num_blocks, layout: tl.constexpr,
    COUNT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """HEIGHT rows, whose first numbers are at `at` `[HEIGHT, 1]`, times a tile of weights: float32 `[HEIGHT, WIDTH]`.

    The tile begins with output `tile * WIDTH`. The weights lie in `num_panels` panels, `first_panel` is the first one.
    """
    output = tile * WIDTH + tl.arange(0, WIDTH)
    num_units = num_blocks * layout.units
    at = at + tl.arange(0, COUNT * _UNIT)[None, :]
    # Outputs that are too many read a panel that is there; their sums are not stored.
    panel = (first_panel + (output // _LANES) % num_panels).to(tl.int64) * num_blocks * layout.block_bytes
    QUADS: tl.constexpr = WIDTH // 4
    quad = tile * QUADS + tl.arange(0, QUADS)
    quad_panel = (first_panel + (quad // _QUADS) % num_panels).to(tl.int64)
    quad_at = quad_panel * num_blocks * (layout.block_bytes // 4) + quad % _QUADS
    sums = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for unit in range(0, num_units, COUNT):
        weights = _weights(words, scales, turns, panel, output % _LANES, quad_at, unit, layout, COUNT, WIDTH, QUADS)
        values = tl.load(at)
        sums = tl.dot(values, weights.to(values.dtype), sums, input_precision=PRECISION)
        at += COUNT * _UNIT
    return sums


@triton.jit(do_not_specialize=["row_ids", "num_rows"])
def expand_packed(
    row_ids, words, scales, turns, out, num_rows, num_blocks, layout: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """COUNT units of ROWS rows of the matrix."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(row_ids + place, mask=place < num_rows, other=0)
    first = tl.program_id(1) * COUNT
    panel = (row // _LANES) * num_blocks * layout.block_bytes
    lane = row % _LANES
    weights = _weights(words, scales, turns, panel, lane, panel // 4 + lane // 4, first, layout, COUNT, ROWS, ROWS)
    column = first * _UNIT + tl.arange(0, COUNT * _UNIT)
    there = out + place.to(tl.int64)[None, :] * (num_blocks * layout.units * _UNIT) + column[:, None]
    tl.store(there, weights.to(out.dtype.element_ty), mask=(place < num_rows)[None, :])


@triton.jit
def _weights(
    words, scales, turns, panel, lane, quad_at, first, layout: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """The weights of COUNT units, from unit `first` on, of ROWS rows: float32 `[COUNT * 32, ROWS]`.

    `panel` `[ROWS]` is the first byte of each row's panel, and `lane` `[ROWS]` is the row's number within its panel.
    `quad_at` `[QUADS]` is the first word of a panel plus the number of four neighbouring rows within it; with QUADS =
    ROWS, each row has an own one.
    """
    unit = first + tl.arange(0, COUNT)
    of_block = ((unit // layout.units) * layout.block_bytes)[:, None]
    unit = (unit % layout.units)[:, None]
    block = panel[None, :] + of_block
    lane = lane[None, :]
    if layout.bits == 8:
        codes = _octets(words, turns, quad_at[None, :] + of_block // 4, unit, lane, layout, COUNT, ROWS, QUADS)
    else:
        codes = _joined_bits(words, turns, block, unit, lane, layout, COUNT, ROWS)
    number = codes.to(tl.float32, bitcast=True)
    PARTS: tl.constexpr = layout.scales_per_unit
    TIMES: tl.constexpr = _UNIT // PARTS
    scale = _scales(words, scales, turns, block, unit, lane, layout, COUNT, ROWS)
    if layout.is_float:
        weights = number * _repeated(scale * layout.float_factor, COUNT * PARTS, TIMES, ROWS)
    else:
        # What is added to each number: the power of two of `_joined_bits`, half of the range, the zero point.
        added = tl.zeros((COUNT * PARTS, ROWS), tl.float32) + (1 << layout.bits) + layout.middle
        if layout.has_zeros:
            added += _bytes(words, turns, block + layout.minima_at, lane)
        if layout.scale.num_bytes == 4:
            number -= _repeated(added, COUNT * PARTS, TIMES, ROWS)
            weights = number * _repeated(scale, COUNT * PARTS, TIMES, ROWS)
        else:
            # Products of `added` are exact, since these scales are short, so that the weight is rounded once.
            least = _repeated(-(added * scale), COUNT * PARTS, TIMES, ROWS)
            weights = tl.fma(number, _repeated(scale, COUNT * PARTS, TIMES, ROWS), least)
    if layout.has_minimum:
        minimum = tl.load(scales + (block + layout.minima_at) // layout.scale.num_bytes + lane).to(tl.float32)
        if layout.has_sub_scales:
            minimum *= -_bytes(words, turns, block + layout.sub_minima_at + unit * _LANES, lane)
        weights += _repeated(minimum, COUNT, _UNIT, ROWS)
    return weights


@triton.jit
def _scales(
    words, scales, turns, block, unit, lane, layout: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The scales of COUNT units, or of their parts that have a sub-scale: float32 `[COUNT * parts, ROWS]`."""
    PARTS: tl.constexpr = layout.scales_per_unit
    if layout.scale.num_bytes == 1:
        # The least power of two is not a normal float32.
        exponents = (_highest_byte(words, turns, block, lane) >> 1) & (0xFF << 23)
        scale = tl.maximum(exponents, 1 << 22).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + block // layout.scale.num_bytes + lane).to(tl.float32)
    if layout.has_sub_scales:
        part = (tl.arange(0, PARTS) * _LANES)[None, :, None]
        at = (block + layout.sub_scales_at + unit * (PARTS * _LANES))[:, None, :] + part
        lane, scale = lane[:, None, :], scale[:, None, :]
        if layout.has_float_sub_scales:
            floats = (_highest_byte(words, turns, at, lane) >> 4) & (-(1 << 31) | (0x7F << 20))
            subs = floats.to(tl.float32, bitcast=True) * _OF_E4M3
        else:
            subs = _bytes(words, turns, at, lane)
        scale = tl.div_rn(subs, tl.broadcast_to(scale, subs.shape)) if layout.divides else subs * scale
        scale = tl.reshape(scale, (COUNT * PARTS, ROWS))
    return scale


@triton.jit
def _joined_bits(
    words, turns, block, unit, lane, layout: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The bits of the floats 2^bits + code, for codes of less than 8 bits: int32 `[COUNT * 32, ROWS]`.

    The code is the highest bits of the float's fraction. GPUs convert integers far more slowly. Codes that are floats
    become floats that are `float_factor` times smaller.
    """
    if layout.is_float:
        low = block + layout.low_at + unit * layout.low_bytes
        codes = _part_of_codes(words, turns, low, lane, 4, 28, 0, _ONES, COUNT, ROWS)
        return (codes >> (8 - layout.exponent_bits)) & (-(1 << 31) | (0x7 << (20 + layout.exponent_bits)))
    LOWEST: tl.constexpr = 23 - layout.bits
    # A centred code of four bits is stored in two's complement, which has the highest bit the other way.
    FLIPPED: tl.constexpr = (1 << 22) if layout.bits == 4 and layout.is_centred else 0
    low = block + layout.low_at + unit * layout.low_bytes
    codes = _part_of_codes(words, turns, low, lane, 4, LOWEST, 0, _ONES, COUNT, ROWS)
    codes = codes ^ (((127 + layout.bits) << 23) ^ FLIPPED)
    if layout.high_bits:
        high = block + layout.high_at + unit * layout.high_bytes
        more = _part_of_codes(words, turns, high, lane, layout.high_bits, LOWEST + 4, _HIGH, _ONES + 1, COUNT, ROWS)
        codes = codes | more
    return codes


@triton.jit
def _part_of_codes(
    words, turns, start, lane, BITS: tl.constexpr, LOWEST: tl.constexpr, TURNS: tl.constexpr,
    ONES: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bits of units that lie together, BITS for each column, from the bit LOWEST on: int32 `[COUNT * 32, ROWS]`.

    `start` `[COUNT, ROWS]` is the first byte of each unit's bits; a word has those of neighbouring columns of a row.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    NUM_WORDS: tl.constexpr = _UNIT // PER_WORD
    word = (tl.arange(0, NUM_WORDS) * _LANES)[None, :, None]
    loaded = tl.reshape(tl.load(words + ((start // 4 + lane)[:, None, :] + word)), (COUNT * NUM_WORDS, ROWS))
    by = tl.load(turns + TURNS + tl.arange(0, PER_WORD))[None, :, None]
    MASK: tl.constexpr = (-1 << LOWEST) if LOWEST + BITS == 32 else ((1 << BITS) - 1) << LOWEST
    codes = _rotated(loaded[:, None, :], by) & _mask(turns, ONES, MASK)[None, :, None]
    return tl.reshape(codes, (COUNT * _UNIT, ROWS))


@triton.jit
def _octets(
    words, turns, at, unit, lane, layout: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """The bits of floats for codes of 8 bits, int32 `[COUNT * 32, ROWS]`.

    These are 256 + 128 + code for integers, and for floats the number divided by `float_factor`. `at` `[COUNT, QUADS]`
    is a word of each block.
    """
    column = (tl.arange(0, _UNIT) * _QUADS)[None, :, None]
    at = (at + layout.low_at // 4 + unit * (layout.low_bytes // 4))[:, None, :] + column
    loaded = tl.reshape(tl.load(words + at), (COUNT * _UNIT, QUADS))
    if QUADS != ROWS:
        quad = tl.broadcast_to(loaded[:, :, None], (COUNT * _UNIT, QUADS, ROWS // QUADS))
        loaded = tl.reshape(quad, (COUNT * _UNIT, ROWS))
    codes = _rotated(loaded, tl.load(turns + lane % 4))
    if layout.is_float:
        codes = (codes >> (8 - layout.exponent_bits)) & (-(1 << 31) | (0x7F << (16 + layout.exponent_bits)))
    else:
        codes = (codes & _mask(turns, _ONES, 0xFF << 15)[None, :]) ^ ((135 << 23) ^ (1 << 22))
    return codes


@triton.jit
def _bytes(words, turns, start, lane):
    """The signed byte of each row in the 16 bytes from `start` on, as a whole number in float32."""
    return (_highest_byte(words, turns, start, lane) >> 24).to(tl.float32)


@triton.jit
def _highest_byte(words, turns, start, lane):
    """An int32 for each row, whose highest byte is the row's of the 16 bytes from `start` on."""
    loaded = tl.load(words + (start // 4 + lane // 4))
    return _rotated(loaded, tl.load(turns + _OF_BYTES + lane % 4))


@triton.jit
def _rotated(word, by):
    """Rotates int32 to the left by 0 to 31 bits."""
    right = word.to(tl.uint32, bitcast=True) >> ((0 - by) & 31).to(tl.uint32, bitcast=True)
    return (word << (by & 31)) | right.to(tl.int32, bitcast=True)


@triton.jit
def _mask(turns, AT: tl.constexpr, NUMBER: tl.constexpr):
    """A number `[1]` that the compiler does not know, so that it stays in a register; `turns` has -1 at AT.

    An operation takes one known number at most, and the compiler would copy a second one into a register each time. Two
    masks whose results meet need an AT each: of one load Triton wants one layout, and masks have two.
    """
    return tl.load(turns + AT + tl.arange(0, 1)) & NUMBER


@triton.jit
def _repeated(values, COUNT: tl.constexpr, TIMES: tl.constexpr, ROWS: tl.constexpr):
    """Each of COUNT rows TIMES times: `[COUNT * TIMES, ROWS]` of `[COUNT, ROWS]`."""
    return tl.reshape(tl.broadcast_to(values[:, None, :], (COUNT, TIMES, ROWS)), (COUNT * TIMES, ROWS))
