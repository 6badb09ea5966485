"""Converts weights to panels; see `layouts`. All tensors are on the CPU unless something else is said.

Numbers of a few bits stay in words wherever they are words in the file: numbers by themselves would take several times
the memory, and a processor would handle them one by one.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from corolla.chassis import heap
from corolla.chassis.processors import available_cores
from corolla.kernels.layouts import E2M1, UNIT, Layout, PlainLayout, Scale, SubScale
from corolla.kernels.llvm_text import LANES

# How many numbers are reordered at a time; more numbers would only take more memory.
_CHUNK_WEIGHTS: Final = 1 << 17
# A device reorders as many as its launches are worth.
_CHUNK_WEIGHTS_OF_DEVICE: Final = 1 << 24
# The least size for which huge pages are used: the bytes before the first huge page are wasted.
_LEAST_BYTES_IN_HUGE_PAGES: Final = 8 * heap.HUGE_PAGE_BYTES

# The type of words, by their bytes.
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# The highest bit of each number of four bits.
_MIDDLES: Final = 0x88888888 - (1 << 32)
_SCALES: Final = {
    Scale.FLOAT16: torch.float16, Scale.BFLOAT16: torch.bfloat16, Scale.FLOAT32: torch.float32,
    Scale.E8M0: torch.float8_e8m0fnu,
}  # fmt: skip
_SUB_SCALES: Final = {
    SubScale.INT8: torch.int8, SubScale.E4M3: torch.float8_e4m3fn, SubScale.E4M3_DIVIDED: torch.float8_e4m3fn
}  # fmt: skip
# Numbers of 8 bits, by the bits of their exponent.
_OCTETS: Final = {0: torch.int8, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Numbers:
    """The weights of some rows of a file, in one form for all types: `R` rows of `K` columns and `B` blocks.

    Attributes that the type of the weights lacks have the value None.

    Attributes:
        codes: uint8 `[R, K]`: the packed numbers; codes of eight bits are the bits of int8 or a float. Or int32
            `[R, K / 8]`: the four low bits of eight numbers in a word, the first number lowest.
        scales: `[R, B]` in the layout's scale type (E8M0: uint8), one for each block.
        minima: `[R, B]` in the layout's scale type, added to the weights; with `sub_minima`, the products of both
            are subtracted instead.
        sub_scales: int8 `[R, B * n]`, `n` for each block; uint8 with the bits of E4M3.
        sub_minima: int8 `[R, B * n]`, `n` for each block.
        zeros: int8 `[R, B]`: zero points, relative to the middle of the range of codes.
        high: int32 `[R, K * bits / 32]`: the bits above the four low ones in words, the first number lowest, where
            `codes` are words.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_minima: Tensor | None = None
    zeros: Tensor | None = None
    high: Tensor | None = None


class Panels(NamedTuple):
    """A matrix in the form that a kernel reads.

    Attributes:
        panels: uint8 `[panels, blocks, bytes of a block]`, see `repack`.
        order: int32 `[in]`, the input of each column; None: columns are in the order of the inputs.
    """

    panels: Tensor
    order: Tensor | None = None


def repack(
    read: Callable[[int, int], Tensor],
    num_rows: int,
    num_columns: int,
    layout: Layout,
    device: torch.device | None = None,
    name: str | None = None,
) -> Tensor:
    """Converts the rows of a file to panels.

    Args:
        read: returns the rows `[first, end)` in the file's form, uint8 `[R, bytes of a row]` on any device; see
            `repack_numbers`.
        device: where the panels are made, and stay; None: the CPU.
        name: the type's name in GGUF; None: it is the layout's.

    Returns:
        uint8 `[ceil(rows / 16), blocks of a row, layout.block_bytes]`; missing rows of the last panel are zero.
    """

    def numbers(first: int, end: int) -> Numbers:
        rows = read(first, end).to(device)
        return _READERS[name or layout.name](rows.reshape(len(rows) * (num_columns // layout.block_weights), -1))

    return repack_numbers(numbers, num_rows, num_columns, layout, device)


def repack_numbers(
    read: Callable[[int, int], Numbers],
    num_rows: int,
    num_columns: int,
    layout: Layout,
    device: torch.device | None = None,
) -> Tensor:
    """Converts numbers to panels; see `repack` for the result.

    Args:
        read: returns the numbers of the rows `[first, end)`. In these, each block of a row may be a row of its own. On
            the CPU, several threads call it.
        device: where the numbers are, and the panels shall be; None: the CPU.
    """
    panels = empty_panels(num_rows, num_columns, layout, device)
    at_once = _CHUNK_WEIGHTS if panels.device.type == "cpu" else _CHUNK_WEIGHTS_OF_DEVICE
    num_panels, num_blocks, _ = panels.shape
    step = max(1, at_once // (LANES * num_columns))
    is_inferring = torch.is_inference_mode_enabled()

    @torch.inference_mode(is_inferring)
    def fill(first: int) -> None:
        end = min(num_rows, (first + step) * LANES)
        numbers = read(first * LANES, end)
        in_rows = {
            name: part.contiguous().reshape((end - first * LANES) * num_blocks, -1)
            for name in Numbers.__slots__
            if (part := getattr(numbers, name)) is not None
        }
        if missing := -end % LANES * num_blocks:
            # A scale that divides is 1, so that these weights are zero, too.
            fillings = {name: int(name == "scales" and layout.divides) for name in in_rows}
            in_rows = {
                name: torch.cat([part, part.new_full((missing, part.shape[1]), fillings[name])])
                for name, part in in_rows.items()
            }
        _write(Numbers(**in_rows), layout, panels[first : first + step])

    firsts = range(0, num_panels, step)
    num_threads = min(available_cores() // torch.get_num_threads(), len(firsts))
    if num_threads <= 1 or panels.device.type != "cpu":
        for first in firsts:
            fill(first)
    else:
        with ThreadPoolExecutor(num_threads, "panels") as threads:
            for _ in threads.map(fill, firsts):
                pass
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


def empty_panels(
    num_rows: int, num_columns: int, layout: Layout | PlainLayout, device: torch.device | None = None
) -> Tensor:
    """Uninitialised panels for a matrix: uint8 `[panels, blocks, layout.block_bytes]` on the device; None: the CPU."""
    if device is not None and device.type != "cpu":
        shape = (-(-num_rows // LANES), num_columns // layout.block_weights, layout.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=device)
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
    elif layout.is_float:
        numbers = torch.tensor(E2M1, device=panels.device)[bits(layout.low_at, 4)]
    else:
        codes = bits(layout.low_at, 4) ^ (8 if layout.bits == 4 and layout.is_centred else 0)
        if layout.high_bits:
            codes = codes | bits(layout.high_at, layout.high_bits) << 4
        numbers = (codes - layout.middle).float()
    if layout.has_zeros:
        numbers = numbers - part(layout.minima_at, 1, torch.int8)
    scales = part(0, 1, _SCALES[layout.scale]).float()
    if layout.sub_scale_weights is not None:
        subs = part(layout.sub_scales_at, layout.units * layout.scales_per_unit, _SUB_SCALES[layout.sub_scale])
        scales = subs.float() / scales if layout.divides else subs.float() * scales
        scales = scales.repeat_interleave(layout.sub_scale_weights, dim=2)
    weights = numbers * scales
    if layout.has_minimum:
        minima = part(layout.minima_at, 1, _SCALES[layout.scale]).float()
        if layout.has_sub_scales:
            minima = -(minima * part(layout.sub_minima_at, layout.units, torch.int8)).repeat_interleave(UNIT, dim=2)
        weights = weights + minima
    return weights.permute(0, 3, 1, 2).reshape(num_panels * LANES, -1)[:num_rows]


def _write(numbers: Numbers, layout: Layout, panels: Tensor) -> None:
    """Fills panels with numbers in which each block is a row of its own: `R` is rows times blocks, and `B` is 1."""
    num_panels, num_blocks, _ = panels.shape
    at = 0
    subs = (numbers.zeros, numbers.sub_scales, numbers.sub_minima)
    low, high = _low_bits(numbers.codes, layout), numbers.high
    if layout.high_bits and high is None:
        high = joined(numbers.codes.view(torch.int64) >> 4, layout.high_bits)
    for part in (numbers.scales, numbers.minima, *subs, low, high):
        if part is None:
            continue
        # A copy of whole words is far faster than one of their bytes.
        words = part.view(_WORDS[part.element_size()])
        end = at + LANES * words.shape[1] * words.element_size()
        target = panels[:, :, at:end].view(words.dtype).view(num_panels, num_blocks, -1, LANES)
        target.copy_(words.view(num_panels, LANES, num_blocks, -1).permute(0, 2, 3, 1))
        at = end


def _low_bits(codes: Tensor, layout: Layout) -> Tensor:
    """The low bits as words, `[R, words]`.

    A word is one number of eight bits, or the four low bits of eight numbers, the first number lowest.
    """
    if layout.bits == 8:
        return codes
    words = codes if codes.dtype == torch.int32 else joined(codes.view(torch.int64), 4)
    return words ^ _MIDDLES if layout.bits == 4 and layout.is_centred else words  # in two's complement


def joined(octets: Tensor, bits: int) -> Tensor:
    """Joins the lowest bits of bytes, the first byte's lowest.

    Args:
        octets: int64 `[..., n]`, eight bytes each, on any device.
        bits: 1, 2 or 4, of each byte.

    Returns:
        int32 `[..., n * bits / 4]` on the same device.
    """
    words = octets & _pattern(bits, 8)
    moved = torch.empty_like(words)
    for width in (8, 16, 32):
        # Neighbours of `width` bits, of which the lower part is filled, become one.
        torch.bitwise_right_shift(words, width - bits, out=moved)
        bits *= 2
        words.bitwise_or_(moved).bitwise_and_(_pattern(bits, 2 * width))
    return words.to({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]).view(torch.int32)


def _pattern(ones: int, width: int) -> int:
    """64 bits, of which the lowest `ones` of each `width` are set."""
    return sum(((1 << ones) - 1) << at for at in range(0, 64, width))


def _halves(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


def _octets(content: Tensor) -> Tensor:
    """Bytes `[..., n]` by eights, int64 `[..., n / 8]`."""
    return content.contiguous().view(torch.int64)


def _nibbles(content: Tensor) -> Tensor:
    """Joins the low halves of each run of bytes, `[R, n, bytes]`, then the high ones: int32 `[R, n * bytes / 4]`."""
    octets = _octets(content)
    return torch.cat([joined(octets, 4), joined(octets >> 4, 4)], dim=-1).flatten(1)


def _of_q45(blocks: Tensor, *, bits: int, has_minimum: bool) -> Numbers:
    high = blocks[:, -20:-16].contiguous().view(torch.int32) if bits == 5 else None
    minima = _halves(blocks, 2) if has_minimum else None
    return Numbers(_nibbles(blocks[:, None, -16:]), _halves(blocks, 0), minima, high=high)


def _of_q8_0(blocks: Tensor) -> Numbers:
    return Numbers(blocks[:, 2:], _halves(blocks, 0))


def _of_q45_k(blocks: Tensor, *, bits: int) -> Numbers:
    # Four of the twelve bytes have scales of six bits, and four have minima. Their highest two bits belong to further
    # scales and minima, whose other bits the last four bytes have.
    scales, minima, others = torch.split(blocks[:, 4:16], 4, dim=1)
    sub_scales = torch.cat([scales & 63, others & 15 | scales >> 2 & 48], dim=1)
    sub_minima = torch.cat([minima & 63, others >> 4 | minima >> 2 & 48], dim=1)
    high = None
    if bits == 5:
        # A byte holds the fifth bits of eight columns that are 32 apart.
        places = torch.arange(8, device=blocks.device)[:, None]
        high = joined(_octets(blocks[:, None, 16:48]) >> places, 1).flatten(1)
    codes = _nibbles(blocks[:, -128:].view(-1, 4, 32))
    return Numbers(codes, _halves(blocks, 0), _halves(blocks, 2), sub_scales, sub_minima, high=high)


def _of_q6_k(blocks: Tensor) -> Numbers:
    codes = _nibbles(blocks[:, :128].view(-1, 2, 64))
    places = torch.arange(0, 8, 2, device=blocks.device)[:, None]
    high = joined(_octets(blocks[:, 128:192].view(-1, 2, 1, 32)) >> places, 2).flatten(1)
    return Numbers(codes, _halves(blocks, 208), sub_scales=blocks[:, 192:208], high=high)


def _of_mxfp4(blocks: Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, None, 1:]), blocks[:, :1])


_READERS: Final[Mapping[str, Callable[[Tensor], Numbers]]] = {
    "MXFP4": _of_mxfp4,
    "Q4_0": lambda blocks: _of_q45(blocks, bits=4, has_minimum=False),
    "Q4_1": lambda blocks: _of_q45(blocks, bits=4, has_minimum=True),
    "Q5_0": lambda blocks: _of_q45(blocks, bits=5, has_minimum=False),
    "Q5_1": lambda blocks: _of_q45(blocks, bits=5, has_minimum=True),
    "Q8_0": _of_q8_0,
    "Q4_K": lambda blocks: _of_q45_k(blocks, bits=4),
    "Q5_K": lambda blocks: _of_q45_k(blocks, bits=5),
    "Q6_K": _of_q6_k,
}
