"""Runs the kernels for packed weights on tensors, which are on one device. Panels are those of `kernels.repacking`."""

from typing import Final

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout, Scale
from corolla.kernels.triton import packed_code
from corolla.kernels.triton.launches import launch, precision

SCALES: Final = {Scale.FLOAT16: torch.float16, Scale.BFLOAT16: torch.bfloat16, Scale.FLOAT32: torch.float32}
"""The dtypes of scales."""

# A tile of a call of up to so many rows has these rows and outputs, units of one round, and warps.
_TILES: Final = ((16, (16, 64, 4, 4)), (32, (32, 64, 4, 4)), (64, (64, 64, 4, 4)))
_LARGEST_TILE: Final = (128, 128, 2, 8)
_EXPANDED_ROWS: Final = 16
_EXPANDED_UNITS: Final = 4


def multiply_packed(
    layout: Layout,
    rows: Tensor,
    panels: Tensor,
    num_outputs: int,
    bias: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Computes `rows W^T + b` so that no row depends on the others. Sums are float32.

    Args:
        layout: the layout of the panels.
        rows: `[R, in]` in float32, bfloat16 or float16.
        panels: uint8 `[panels, blocks, bytes of a block]`.
        num_outputs: how many rows the matrix has; the panels may have more.
        bias: `[num_outputs]` in any of these dtypes; None: there is none.
        order: int32 `[in]`, see `Panels`, or None.

    Returns:
        `[R, num_outputs]` in the dtype of the rows.

    Raises:
        ValueError: rows and panels do not fit each other.
    """
    num_blocks = panels.shape[1]
    num_rows, num_columns = rows.shape
    if num_blocks * layout.block_weights != num_columns:
        raise ValueError(f"rows of {num_columns} numbers do not fit {num_blocks} blocks of {layout.name}")
    rows = rows.contiguous() if order is None else rows.index_select(1, order)
    out = rows.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out
    height, width, most_units, warps = next((tile for most, tile in _TILES if num_rows <= most), _LARGEST_TILE)
    launch(
        packed_code.multiply_packed, (-(-num_rows // height) * -(-num_outputs // width),),
        rows, *_views(panels, layout), out if bias is None else bias, out, num_rows, num_outputs, num_blocks,
        layout=layout, HAS_BIAS=bias is not None, COUNT=_units_of_round(num_blocks * layout.units, most_units),
        HEIGHT=height, WIDTH=width, GROUP=8, PRECISION=precision(rows.dtype), num_warps=warps, num_stages=3,
        enable_fp_fusion=False,
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
        count = _units_of_round(num_units, _EXPANDED_UNITS)
        launch(
            packed_code.expand_packed, (-(-len(row_ids) // _EXPANDED_ROWS), num_units // count),
            row_ids, *_views(panels, layout), rows, len(row_ids), num_blocks, layout=layout, COUNT=count,
            ROWS=_EXPANDED_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return rows


def _units_of_round(num_units: int, most: int) -> int:
    """How many units of 32 columns a round takes: a power of 2 up to `most` that divides their number."""
    while num_units % most:
        most //= 2
    return most


def _views(panels: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views the bytes as int32, as float16, in the type of scales, and as int8: a block has parts of these types."""
    flat = panels.view(-1)
    return flat.view(torch.int32), flat.view(torch.float16), flat.view(SCALES[layout.scale]), flat.view(torch.int8)
