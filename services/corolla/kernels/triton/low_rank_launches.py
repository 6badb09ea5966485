"""Runs the kernels for adapters' low-rank products on tensors, which are contiguous and on one device."""

from typing import Any, Final

import torch
from torch import Tensor

from corolla.kernels.triton import launches, low_rank_code
from corolla.kernels.triton.launches import precision
from corolla.kernels.triton.variants import variant

TILE_TOKENS: Final = 16
"""The most tokens of a tile."""
_RANKS: Final = 16
_COLUMNS: Final = 128
_OUTPUTS: Final = 64
# One program walks about so many inner columns, at most `_MOST_SPLITS` of them side by side.
_COLUMNS_OF_SPLIT: Final = 512
_MOST_SPLITS: Final = 8


def add_low_rank(
    rows: Tensor, output: Tensor, tiles: Tensor, table: Tensor, first_linear: int, num_linears: int, most_rank: int
) -> None:
    """Adds the low-rank products of neighbouring linear layers to `output`, in place.

    Args:
        rows: `[N, in]`, the input of the layers, in the model's dtype.
        output: `[N, out]`, the outputs of these layers side by side, in the same dtype.
        tiles: int32 `[T, 3]`: the first token of each tile, how many tokens it has, at most `TILE_TOKENS`, and their
            slot in the table; tiles with a slot below 0 are left out.
        table: int64 `[linear layers, slots, 5]`: for each linear layer and adapter the addresses of the factors
            `[rank, in]` and `[rank, width]` in the model's dtype, the rank, the first one of the layer's outputs in
            `output`, and the width. A rank of 0 means that there is no product.
        first_linear: the first one of the layers in the table.
        num_linears: how many layers there are.
        most_rank: no rank of the tiles' slots is above it.
    """
    num_tokens, width = rows.shape
    splits = min(_MOST_SPLITS, -(-width // _COLUMNS_OF_SPLIT))
    stored = -(-most_rank // _RANKS) * _RANKS
    inner = torch.empty(num_linears, splits, num_tokens, stored, dtype=torch.float32, device=rows.device)
    numbers = (num_tokens, stored, first_linear, table.shape[1])
    options: dict[str, Any] = {
        "SPLITS": splits, "HEIGHT": TILE_TOKENS, "RANKS": _RANKS,
        "PRECISION": precision(rows.dtype), "num_warps": 4, "enable_fp_fusion": False,
    }  # fmt: skip
    shrinking = variant(low_rank_code.shrink, WIDTH=width, BLOCK=_COLUMNS, **options)
    expanding = variant(low_rank_code.expand, WIDTH=output.shape[1], BLOCK=_OUTPUTS, **options)
    launches.launch(shrinking, (len(tiles), splits, num_linears), rows, tiles, table, inner, *numbers)
    grid = (len(tiles), -(-output.shape[1] // _OUTPUTS), num_linears)
    launches.launch(expanding, grid, inner, tiles, table, output, *numbers)
