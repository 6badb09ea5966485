"""The kernels for the low-rank products of adapters, in Triton's language.

A tile is up to HEIGHT tokens of one row, which have one adapter. The inner dimension is cut into SPLITS parts by its
size alone, and their sums are added in one order, so no token depends on the others, as `device_code` explains. Factors
lie where a table says, so adapters need not lie together, and a recorded step runs with any of them.
"""

import triton
import triton.language as tl

ENTRY = 5
"""How many numbers an entry of the table has."""
_ENTRY = tl.constexpr(ENTRY)
# Factors lie at addresses that are multiples of this many bytes.
_ALIGNED = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_tokens", "stride", "first_linear", "num_slots"])
def shrink(
    rows, tiles, table, inner, num_tokens, stride, first_linear, num_slots,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HEIGHT: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of a tile's rows times the first factor of one linear layer: float32 sums for each rank."""
    tile, split, linear = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + tile * 3 + 2)
    if slot < 0:
        return
    entry = table + ((first_linear + linear).to(tl.int64) * num_slots + slot) * _ENTRY
    rank = tl.load(entry + 2).to(tl.int32)
    address = tl.load(entry).to(tl.pointer_type(rows.dtype.element_ty))
    down = tl.multiple_of(address, _ALIGNED)
    token = tl.load(tiles + tile * 3) + tl.arange(0, HEIGHT)
    inside = tl.arange(0, HEIGHT) < tl.load(tiles + tile * 3 + 1)
    # Whole blocks of columns of each part, so that a part's end depends on the width only.
    PART: tl.constexpr = ((WIDTH + SPLITS * BLOCK - 1) // (SPLITS * BLOCK)) * BLOCK
    for first in range(0, rank, RANKS):
        number = first + tl.arange(0, RANKS)
        sums = tl.zeros((HEIGHT, RANKS), tl.float32)
        for start in range(0, PART, BLOCK):
            column = split * PART + start + tl.arange(0, BLOCK)
            is_column = column < WIDTH
            left = tl.load(
                rows + token.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=inside[:, None] & is_column[None, :],
                other=0.0,
            )  # fmt: skip
            right = tl.load(
                down + number[None, :] * WIDTH + column[:, None], mask=(number < rank)[None, :] & is_column[:, None],
                other=0.0,
            )  # fmt: skip
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
        place = ((linear * SPLITS + split).to(tl.int64) * num_tokens + token) * stride
        tl.store(inner + place[:, None] + number[None, :], sums, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_tokens", "stride", "first_linear", "num_slots"])
def expand(
    inner, tiles, table, out, num_tokens, stride, first_linear, num_slots,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HEIGHT: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds a tile of a linear layer's product, rounded to the output's dtype, to `out` `[N, WIDTH]`."""
    tile, part, linear = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + tile * 3 + 2)
    if slot < 0:
        return
    entry = table + ((first_linear + linear).to(tl.int64) * num_slots + slot) * _ENTRY
    rank, width = tl.load(entry + 2).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    if rank == 0 or part * BLOCK >= width:
        return
    address = tl.load(entry + 1).to(tl.pointer_type(out.dtype.element_ty))
    up = tl.multiple_of(address, _ALIGNED)
    token = tl.load(tiles + tile * 3) + tl.arange(0, HEIGHT)
    inside = tl.arange(0, HEIGHT) < tl.load(tiles + tile * 3 + 1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    sums = tl.zeros((HEIGHT, BLOCK), tl.float32)
    for first in range(0, rank, RANKS):
        number = first + tl.arange(0, RANKS)
        left = tl.zeros((HEIGHT, RANKS), tl.float32)
        for split in tl.static_range(SPLITS):
            place = ((linear * SPLITS + split).to(tl.int64) * num_tokens + token) * stride
            left += tl.load(
                inner + place[:, None] + number[None, :], mask=inside[:, None] & (number < rank)[None, :], other=0.0
            )
        right = tl.load(
            up + number.to(tl.int64)[:, None] * width + column[None, :],
            mask=(number < rank)[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        sums = tl.dot(left.to(right.dtype), right, sums, input_precision=PRECISION)
    there = out + token.to(tl.int64)[:, None] * WIDTH + tl.load(entry + 3) + column[None, :]
    mask = inside[:, None] & is_column[None, :]
    added = tl.load(there, mask=mask, other=0.0).to(tl.float32) + sums.to(out.dtype.element_ty).to(tl.float32)
    tl.store(there, added.to(out.dtype.element_ty), mask=mask)
