"""Runs the kernels that choose tokens on tensors, which are on one device and contiguous."""

import functools
from typing import Any, Final

import torch
from torch import Tensor

from corolla.kernels.triton import choice_code
from corolla.kernels.triton.launches import launch, power_of_two
from corolla.kernels.triton.variants import Variant, variant

# Tokens of a row that a program looks at together: one of `penalise`, and one of `draw_tokens`.
_PENALTIES_BLOCK: Final = 1024
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


def penalise(logits: Tensor, are_seen: Tensor | None, counts: Tensor | None, settings: Tensor) -> Tensor:
    """Applies penalties for tokens that the texts have.

    Args:
        logits: float32 `[R, V]`.
        are_seen: bool `[R, V]`: the tokens to which the repetition penalty applies; None: to none.
        counts: float32 `[R, V]`: how often an answer has each token; None: never.
        settings: float32 `[R, 3]`: the repetition, frequency and presence penalty of each row.

    Returns:
        float32 `[R, V]`.
    """
    out = torch.empty_like(logits)
    num_rows, width = logits.shape
    block = min(_PENALTIES_BLOCK, power_of_two(width))
    penalties = _penalties(are_seen is not None, counts is not None, block)
    seen = logits if are_seen is None else are_seen.view(torch.uint8)
    grid = (num_rows, -(-width // block))
    launch(penalties, grid, logits, seen, logits if counts is None else counts, settings, out, width)
    return out


@functools.cache
def _penalties(has_seen: bool, has_counts: bool, block: int) -> Variant:
    return variant(choice_code.penalise, HAS_SEEN=has_seen, HAS_COUNTS=has_counts, BLOCK=block, num_warps=4, **_EXACT)


@functools.cache
def _draw(block: int) -> Variant:
    return variant(choice_code.draw_tokens, BLOCK=block, num_warps=16, **_EXACT)
