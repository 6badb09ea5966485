"""Converts weights to panels; see `layouts`. All tensors are on the CPU unless something else is said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from corolla.chassis import heap
from corolla.kernels.layouts import UNIT, Layout, PlainLayout, Scale
from corolla.kernels.llvm_text import LANES

# How many numbers are reordered at a time; more numbers would only take more memory.
_CHUNK_WEIGHTS: Final = 1 << 17
# A device reorders as many as its launches are worth.
_CHUNK_WEIGHTS_OF_DEVICE: Final = 1 << 24
# The least size for which huge pages are used: the bytes before the first huge page are wasted.
_LEAST_BYTES_IN_HUGE_PAGES: Final = 8 * heap.HUGE_PAGE_BYTES

# Numbers of 8 bits, by the bits of their exponent.
_OCTETS: Final = {0: torch.int8, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Numbers:
    """The weights of some rows of a file, in one form for all types: `R` rows of `K` columns and `B` blocks.

    Attributes that the type of the weights lacks have the value None.

    Attributes:
        codes: uint8 `[R, K]`: the packed numbers; codes of eight bits are the bits of int8 or a float.
        scales: `[R, B]` in the layout's scale type, one for each block.
        minima: `[R, B]` in the layout's scale type, added to the weights; with `sub_minima`, the products of both
            are subtracted instead.
        sub_scales: int8 `[R, B * n]`, `n` for each block.
        sub_minima: int8 `[R, B * n]`, `n` for each block.
        zeros: int8 `[R, B]`: zero points, relative to the middle of the range of codes.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_minima: Tensor | None = None
    zeros: Tensor | None = None


class Panels(NamedTuple):
    """A matrix in the form that a kernel reads.

    Attributes:
        panels: uint8 `[panels, blocks, bytes of a block]`, see `repack`.
        order: int32 `[in]`, the input of each column; None: columns are in the order of the inputs.
    """

    panels: Tensor
    order: Tensor | None = None


def repack(read: Callable[[int, int], Tensor], num_rows: int, num_columns: int, layout: Layout) -> Tensor:
    """Converts the rows of a file to panels.

    Args:
        read: returns the rows `[first, end)` in the file's form, uint8 `[R, bytes of a row]`.

    Returns:
        uint8 `[ceil(rows / 16), blocks of a row, layout.block_bytes]`; missing rows of the last panel are zero.
    """

    def numbers(first: int, end: int) -> Numbers:
        rows = read(first, end)
        return _READERS[layout.name](rows.reshape(len(rows) * (num_columns // layout.block_weights), -1))

    return repack_numbers(numbers, num_rows, num_columns, layout)


def repack_numbers(
    read: Callable[[int, int], Numbers],
    num_rows: int,
    num_columns: int,
    layout: Layout,
    device: torch.device | None = None,
) -> Tensor:
    """Converts numbers to panels; see `repack` for the result.

    Args:
        read: returns the numbers of the rows `[first, end)`. In these, each block of a row may be a row of its own.
        device: where the numbers are, and the panels shall be; None: the CPU.
    """
    panels = empty_panels(num_rows, num_columns, layout)
    at_once = _CHUNK_WEIGHTS
    if device is not None and device.type != "cpu":
        panels, at_once = torch.empty_like(panels, device=device), _CHUNK_WEIGHTS_OF_DEVICE
    num_panels, num_blocks, _ = panels.shape
    step = max(1, at_once // (LANES * num_columns))
    for first in range(0, num_panels, step):
        end = min(num_rows, (first + step) * LANES)
        numbers = read(first * LANES, end)
        in_rows = {
            name: part.contiguous().reshape((end - first * LANES) * num_blocks, -1)
            for name in Numbers.__slots__
            if (part := getattr(numbers, name)) is not None
        }
        if missing := -end % LANES * num_blocks:
            in_rows = {
                name: torch.cat([part, part.new_zeros(missing, part.shape[1])]) for name, part in in_rows.items()
            }
        panels[first : first + step] = _assembled(Numbers(**in_rows), layout, num_blocks)
    return panels


def lay_out(
    weight: Tensor,
    layout: PlainLayout,
    into: Tensor | None = None,
    leave: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Converts a plain matrix to panels; see `repack` for the result.

    Args:
        weight: `[out, in]` on the CPU, in the layout's dtype.
        into: where the panels go, uint8 `[panels, blocks, layout.block_bytes]`, see `empty_panels`; None: into new
            memory.
        leave: is called with each part `[R, in]` of the matrix once this function no longer reads it.

    Raises:
        ValueError: the number of columns is not a multiple of a block's columns.
    """
    num_rows, num_columns = weight.shape
    if num_columns % layout.block_weights:
        raise ValueError(f"{num_columns} columns are not whole blocks of {layout.block_weights}")
    panels = empty_panels(num_rows, num_columns, layout) if into is None else into
    step = max(1, _CHUNK_WEIGHTS // (LANES * num_columns)) * LANES
    for first in range(0, num_rows, step):
        rows = part = weight.detach()[first : first + step]
        if missing := -len(rows) % LANES:
            rows = torch.cat([rows, rows.new_zeros(missing, num_columns)])
        blocks = rows.reshape(-1, LANES, num_columns // layout.block_weights, layout.block_weights).transpose(1, 2)
        first_panel = first // LANES
        target = panels[first_panel : first_panel + len(blocks)]
        target.copy_(blocks.contiguous().view(torch.uint8).reshape(target.shape))
        if leave is not None:
            leave(part)
    return panels


def empty_panels(num_rows: int, num_columns: int, layout: Layout | PlainLayout) -> Tensor:
    """Uninitialised panels for a matrix: uint8 `[panels, blocks, layout.block_bytes]`."""
    return empty_matrices(1, num_rows, num_columns, layout)[0]


def empty_matrices(
    num_matrices: int, num_rows: int, num_columns: int, layout: Layout | PlainLayout
) -> tuple[Tensor, ...]:
    """Uninitialised panels for several matrices in contiguous memory, in huge pages where the system has them.

    Each matrix is uint8 `[panels, blocks, layout.block_bytes]`.
    """
    num_panels, num_blocks = -(-num_rows // LANES), num_columns // layout.block_weights
    num_bytes = num_matrices * num_panels * num_blocks * layout.block_bytes
    if num_bytes < _LEAST_BYTES_IN_HUGE_PAGES:
        room = torch.empty(num_bytes, dtype=torch.uint8)
    else:
        room = torch.empty(num_bytes + heap.HUGE_PAGE_BYTES, dtype=torch.uint8)
        offset = -room.data_ptr() % heap.HUGE_PAGE_BYTES
        room = room[offset : offset + num_bytes]
        heap.prefer_huge_pages(room.data_ptr(), num_bytes)
    return room.view(num_matrices, num_panels, num_blocks, layout.block_bytes).unbind()


def unpack(panels: Tensor, layout: Layout, num_rows: int) -> Tensor:
    """The weights that panels stand for, by their definition: float32 `[num_rows, in]` on the panels' device.

    It takes many times the memory of the panels. Kernels are compared with it.

    Args:
        panels: uint8 `[panels, blocks, layout.block_bytes]` on any device.
        layout: the layout of the panels.
        num_rows: how many rows the matrix has.
    """
    num_panels, num_blocks, _ = panels.shape
    scale_type = {Scale.FLOAT16: torch.float16, Scale.BFLOAT16: torch.bfloat16, Scale.FLOAT32: torch.float32}

    def part(at: int, num_words: int, dtype: torch.dtype) -> Tensor:
        """Words of the 16 rows: `[panels, blocks, num_words, 16]`."""
        taken = panels[:, :, at : at + num_words * LANES * dtype.itemsize].contiguous()
        return taken.view(dtype).view(num_panels, num_blocks, num_words, LANES)

    def bits(at: int, count: int) -> Tensor:
        words = part(at, layout.block_weights * count // 32, torch.int32)[..., None, :]
        shifts = torch.arange(0, 32, count, dtype=torch.int32, device=panels.device)[:, None]
        return ((words >> shifts) & ((1 << count) - 1)).flatten(2, 3)

    if layout.bits == 8:
        numbers = part(layout.low_at, layout.block_weights, _OCTETS[layout.exponent_bits]).float()
    else:
        codes = bits(layout.low_at, 4)
        if layout.bits == 4 and layout.is_centred:
            codes = codes ^ 8
        if layout.high_bits:
            codes = codes | bits(layout.high_at, layout.high_bits) << 4
        numbers = (codes - layout.middle).float()
    if layout.has_zeros:
        numbers = numbers - part(layout.minima_at, 1, torch.int8)
    scales = part(0, 1, scale_type[layout.scale]).float()
    if layout.sub_scale_weights is not None:
        subs = part(layout.sub_scales_at, layout.units * layout.scales_per_unit, torch.int8)
        scales = (scales * subs).repeat_interleave(layout.sub_scale_weights, dim=2)
    weights = numbers * scales
    if layout.has_minimum:
        minima = part(layout.minima_at, 1, scale_type[layout.scale]).float()
        if layout.has_sub_scales:
            minima = -(minima * part(layout.sub_minima_at, layout.units, torch.int8)).repeat_interleave(UNIT, dim=2)
        weights = weights + minima
    return weights.permute(0, 3, 1, 2).reshape(num_panels * LANES, -1)[:num_rows]


def _assembled(numbers: Numbers, layout: Layout, num_blocks: int) -> Tensor:
    """The panels of numbers in which each block is a row of its own: `R` is rows times blocks here, and `B` is 1."""

    def in_panels(values: Tensor) -> Tensor:
        """Reorders `[R, words, bytes of a word]` to `[panels, blocks, words * 16 * bytes of a word]`."""
        words = values.reshape(-1, LANES, num_blocks, *values.shape[1:]).permute(0, 2, 3, 1, 4)
        return words.reshape(-1, num_blocks, values[0].numel() * LANES)

    parts = [in_panels(numbers.scales.contiguous().view(torch.uint8)[:, None])]
    if numbers.minima is not None:
        parts.append(in_panels(numbers.minima.contiguous().view(torch.uint8)[:, None]))
    for sub in (numbers.zeros, numbers.sub_scales, numbers.sub_minima):
        if sub is not None:
            parts.append(in_panels(sub.contiguous().view(torch.uint8)[:, :, None]))
    parts.append(in_panels(_low_bits(numbers.codes, layout)))
    if layout.high_bits:
        parts.append(in_panels(_high_bits(numbers.codes, layout)))
    return torch.cat(parts, dim=-1)


def _low_bits(codes: Tensor, layout: Layout) -> Tensor:
    """The low bits as words, `[R, words, bytes of a word]`.

    A word is one number of eight bits, or the four low bits of eight numbers, the first number lowest.
    """
    if layout.bits == 8:
        return codes[:, :, None]
    if layout.bits == 4 and layout.is_centred:
        codes = codes ^ 8  # in two's complement
    return _joined(codes & 15, 4).reshape(len(codes), -1, 4)


def _high_bits(codes: Tensor, layout: Layout) -> Tensor:
    return _joined(codes >> 4, layout.high_bits).reshape(len(codes), -1, 4)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Packs neighbouring numbers of `bits` bits into bytes, the first number lowest."""
    per_byte = 8 // bits
    neighbours = codes.reshape(len(codes), -1, per_byte)
    joined = neighbours[..., 0]
    for index in range(1, per_byte):
        joined = joined | neighbours[..., index] << bits * index
    return joined


def _halves(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


def _nibbles(content: Tensor) -> Tensor:
    """Splits each run of bytes, `[R, n, bytes]`, into its low halves and then its high ones: `[R, n * 2 * bytes]`."""
    return torch.cat([content & 15, content >> 4], dim=-1).reshape(len(content), -1)


def _bits(content: Tensor) -> Tensor:
    """The single bits of bytes, `[R, bytes]` to `[R, 8 * bytes]`, the lowest bit of a byte first."""
    return (content[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).reshape(len(content), -1)


def _of_q45(blocks: Tensor, *, bits: int, has_minimum: bool) -> Numbers:
    codes = _nibbles(blocks[:, None, -16:])
    if bits == 5:
        codes = codes | _bits(blocks[:, -20:-16]) << 4
    return Numbers(codes, _halves(blocks, 0), _halves(blocks, 2) if has_minimum else None)


def _of_q8_0(blocks: Tensor) -> Numbers:
    return Numbers(blocks[:, 2:], _halves(blocks, 0))


def _of_q45_k(blocks: Tensor, *, bits: int) -> Numbers:
    from gguf.quants import Q4_K

    sub_scales: Any
    sub_scales, sub_minima = (torch.from_numpy(part) for part in Q4_K.get_scale_min(blocks[:, 4:16].numpy()))
    codes = _nibbles(blocks[:, -128:].reshape(-1, 4, 32))
    if bits == 5:
        # A byte holds the fifth bits of eight columns that are 32 apart.
        fifth = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
        codes = codes | fifth.reshape(len(blocks), -1) << 4
    return Numbers(codes, _halves(blocks, 0), _halves(blocks, 2), sub_scales, sub_minima)


def _of_q6_k(blocks: Tensor) -> Numbers:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    codes = low | high.reshape(len(blocks), -1) << 4
    return Numbers(codes, _halves(blocks, 208), sub_scales=blocks[:, 192:208])


_READERS: Final[Mapping[str, Callable[[Tensor], Numbers]]] = {
    "Q4_0": lambda blocks: _of_q45(blocks, bits=4, has_minimum=False),
    "Q4_1": lambda blocks: _of_q45(blocks, bits=4, has_minimum=True),
    "Q5_0": lambda blocks: _of_q45(blocks, bits=5, has_minimum=False),
    "Q5_1": lambda blocks: _of_q45(blocks, bits=5, has_minimum=True),
    "Q8_0": _of_q8_0,
    "Q4_K": lambda blocks: _of_q45_k(blocks, bits=4),
    "Q5_K": lambda blocks: _of_q45_k(blocks, bits=5),
    "Q6_K": _of_q6_k,
}
