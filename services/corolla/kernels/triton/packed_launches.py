"""Runs the kernels for packed weights on tensors, which are on one device. `kernels.repacking` makes panels."""

import functools
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from corolla.kernels.layouts import UNIT, Layout, Scale
from corolla.kernels.triton import launches, packed_code
from corolla.kernels.triton.launches import precision
from corolla.kernels.triton.variants import variant

SCALES: Final = {
    Scale.FLOAT16: torch.float16, Scale.BFLOAT16: torch.bfloat16, Scale.FLOAT32: torch.float32, Scale.E8M0: torch.uint8
}  # fmt: skip
"""The dtypes of scales."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a product computes, and by how many warps; it changes no bit of a result.

    Attributes:
        height: how many rows.
        width: how many outputs.
        units: how many units of columns are multiplied in one round; a power of 2.
        warps: how many warps compute it.
    """

    height: int
    width: int
    units: int
    warps: int


# Tiles of calls of up to so many rows, in half precision; of few rows, a wide one and a narrow one.
_FEW_ROWS: Final = 16
_TILES_OF_FEW: Final = (Tile(16, 64, 8, 4), Tile(16, 32, 8, 4))
_TILES: Final = ((32, Tile(32, 64, 4, 4)), (64, Tile(64, 64, 4, 4)))
_LARGEST_TILE: Final = Tile(128, 128, 2, 8)
# Products of float32 take registers for a round's columns of a tile, so a round has one unit, and there is no choice.
_FLOAT32_TILES: Final = ((16, Tile(16, 32, 1, 4)), (32, Tile(32, 64, 1, 8)))
_LARGEST_FLOAT32_TILE: Final = Tile(64, 64, 1, 8)
# A large GPU has about so many multiprocessors; a tile of few rows is narrow where some would have nothing to do.
_PROGRAMS: Final = 132
_EXPANDED_ROWS: Final = 16
_EXPANDED_UNITS: Final = 4


def multiply_packed(
    layout: Layout,
    rows: Tensor,
    panels: "Tensor | PanelViews",
    num_outputs: int,
    bias: Tensor | None = None,
    order: Tensor | None = None,
    tiled_outputs: int = 0,
) -> Tensor:
    """Computes `rows W^T + b` so that no row depends on the others. Sums are float32.

    Args:
        layout: the layout of the panels.
        rows: `[R, in]` in float32, bfloat16 or float16.
        panels: uint8 `[panels, blocks, bytes of a block]`, or the views of such panels.
        num_outputs: how many rows the matrix has; the panels may have more.
        bias: `[num_outputs]` in any of these dtypes; None: there is none.
        order: int32 `[in]`, see `Panels`, or None.
        tiled_outputs: for how many outputs the tile is chosen; 0: for `num_outputs`.

    Returns:
        `[R, num_outputs]` in the dtype of the rows.

    Raises:
        ValueError: rows and panels do not fit each other.
    """
    views = PanelViews.fitting(rows, panels, layout)
    num_blocks, num_rows = views.panels.shape[1], len(rows)
    rows = rows.contiguous() if order is None else rows.index_select(1, order)
    out = rows.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    tile = tile_of(num_rows, tiled_outputs or num_outputs, rows.dtype)
    product = variant(
        packed_code.multiply_packed, layout=layout, HAS_BIAS=bias is not None,
        COUNT=units_of_round(num_blocks * layout.units, tile.units), HEIGHT=tile.height, WIDTH=tile.width, GROUP=8,
        PRECISION=precision(rows.dtype), num_warps=tile.warps, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    launches.launch(
        product, (-(-num_rows // tile.height) * -(-num_outputs // tile.width),), rows, views.words, views.scales,
        views.turns, out if bias is None else bias, out, num_rows, num_outputs, num_blocks,
    )  # fmt: skip
    return out


def expand_packed(layout: Layout, row_ids: Tensor, panels: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpacks rows of the matrix.

    Args:
        layout: the layout of the panels.
        row_ids: int64 `[R]`, the numbers of the rows; they are not checked.
        panels: uint8 `[panels, blocks, bytes of a block]`.
        dtype: the dtype to which the weights are rounded.

    Returns:
        `[R, in]` in `dtype`.
    """
    num_blocks = panels.shape[1]
    num_units = num_blocks * layout.units
    rows = torch.empty(len(row_ids), num_blocks * layout.block_weights, dtype=dtype, device=panels.device)
    if len(row_ids):
        count, views = units_of_round(num_units, _EXPANDED_UNITS), PanelViews.from_panels(panels, layout)
        expansion = variant(
            packed_code.expand_packed, layout=layout, COUNT=count, ROWS=_EXPANDED_ROWS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
        launches.launch(
            expansion, (-(-len(row_ids) // _EXPANDED_ROWS), num_units // count), row_ids, views.words, views.scales,
            views.turns, rows, len(row_ids), num_blocks,
        )  # fmt: skip
    return rows


def tile_of(num_rows: int, num_outputs: int, dtype: torch.dtype) -> Tile:
    """The tile of a product; no bit depends on it."""
    if dtype == torch.float32:
        return next((tile for most, tile in _FLOAT32_TILES if num_rows <= most), _LARGEST_FLOAT32_TILE)
    if num_rows <= _FEW_ROWS:
        return _TILES_OF_FEW[num_outputs < _PROGRAMS * _TILES_OF_FEW[0].width]
    return next((tile for most, tile in _TILES if num_rows <= most), _LARGEST_TILE)


def units_of_round(num_units: int, most: int) -> int:
    """How many units of 32 columns a round takes: a power of 2 up to `most` that divides their number."""
    while num_units % most:
        most //= 2
    return most


@dataclass(frozen=True, slots=True)
class PanelViews:
    """The bytes of panels in the types in which kernels load them. They are made once: a view takes microseconds.

    Attributes:
        panels: uint8 `[panels, blocks, bytes of a block]`.
        words: int32 `[bytes / 4]`.
        scales: `[bytes / bytes of a scale]`, in the type of scales.
        turns: see `_turns`.
    """

    panels: Tensor
    words: Tensor
    scales: Tensor
    turns: Tensor

    @classmethod
    def from_panels(cls, panels: Tensor, layout: Layout) -> Self:
        """The views of `panels`, uint8 `[panels, blocks, bytes of a block]`, on any device."""
        flat = panels.view(-1)
        turns = _turns(layout.bits, layout.is_float, panels.device)
        return cls(panels, flat.view(torch.int32), flat.view(SCALES[layout.scale]), turns)

    @classmethod
    def fitting(cls, rows: Tensor, panels: "Tensor | PanelViews", layout: Layout) -> "PanelViews":
        """The views of panels, as of `of`, by which `rows`, `[R, in]`, can be multiplied. Raises ValueError."""
        views = panels if isinstance(panels, PanelViews) else cls.from_panels(panels, layout)
        num_blocks = views.panels.shape[1]
        if num_blocks * layout.block_weights != rows.shape[1]:
            raise ValueError(f"rows of {rows.shape[1]} numbers do not fit {num_blocks} blocks of {layout.name}")
        return views


@functools.cache
def _turns(bits: int, is_float: bool, device: torch.device) -> Tensor:
    """The table of `packed_code`, int32 `[46]`: turns to the left that bring codes to their places.

    Codes become the highest bits of a float32's fraction, or of the whole float32 where they are floats. There are 8
    numbers for the columns of a word of low bits, or 4 for the bytes of a word, then 32 for the columns of a word of
    high bits, then 4 for bytes that become the highest.
    All bits of the last two numbers are set.
    """
    lowest = 23 - bits
    high = max(1, bits - 4)
    low = [-8 * byte + (24 if is_float else lowest) for byte in range(4)] + [0] * 4
    if bits < 8:
        low = [(28 if is_float else lowest) - 4 * column for column in range(8)]
    turns = [*low, *(lowest + 4 - high * column for column in range(UNIT)), *(24 - 8 * byte for byte in range(4))]
    with torch.inference_mode(False):
        return torch.tensor([*(turn % 32 for turn in turns), -1, -1], dtype=torch.int32, device=device)
