"""Runs the kernel that chooses tokens on tensors, which are on one device and contiguous."""

import functools
from typing import Any, Final

import torch
from torch import Tensor

from corolla.kernels.triton import choice_code
from corolla.kernels.triton.launches import launch, power_of_two
from corolla.kernels.triton.variants import Variant, variant

# Tokens of a row that a program looks at together.
_TOKENS_BLOCK: Final = 4096
_EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}


def draw_tokens(probabilities: Tensor, keys: Tensor, positions: Tensor, shares: Tensor, least: Tensor) -> Tensor:
    """Draws a token for each row; see `race`.

    Args:
        probabilities: float32 `[R, V]`.
        keys: int64 `[R]`, the bits of the seeds.
        positions: int64 `[R]`: where in its answer each token is.
        shares: int64 `[R]`, in units of probability; below 0 top-p excludes no token.
        least: float32 `[R]`: less probable tokens do not race.

    Returns:
        int64 `[R]`: -1 for a row of which no probability is above 0.
    """
    num_rows, width = probabilities.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=probabilities.device)
    draw = _draw(min(_TOKENS_BLOCK, max(2, power_of_two(width))))
    launch(draw, (num_rows,), probabilities, keys, positions, shares, least, out, width)
    return out


@functools.cache
def _draw(block: int) -> Variant:
    return variant(choice_code.draw_tokens, BLOCK=block, num_warps=16, **_EXACT)
