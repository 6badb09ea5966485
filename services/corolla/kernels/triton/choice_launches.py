"""Runs the kernels that draw tokens on tensors, which are on one device and contiguous."""

import functools
from typing import Any, Final

import torch
from torch import Tensor

from corolla.kernels.triton import choice_code
from corolla.kernels.triton.launches import launch, power_of_two
from corolla.kernels.triton.variants import Variant, variant

_WORDS_OF_BLOCK: Final = 624
_OUTPUTS_OF_NUMBER: Final = 2
# Numbers of a row that a program of `negated_shares` makes, and tokens that one of `draw_tokens` looks at together.
_SHARES_BLOCK: Final = 1024
_TOKENS_BLOCK: Final = 4096
_EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}


def draw_negated(streams: Tensor, slots: Tensor, width: int) -> Tensor:
    """Draws the next numbers of some streams, and moves the streams.

    Args:
        streams: int32 `[S, W]`: in each row a block of 624 words of MT19937, then how many of its words were used, from
            1 to 624.
        slots: int64 `[R]`: the rows' streams; each occurs once.
        width: how many numbers a row gets.

    Returns:
        float64 `[R, width]`: the numbers, as `torch.rand` draws them of the same generator on a CPU, times -1.
    """
    num_rows, num_drawn = len(slots), _OUTPUTS_OF_NUMBER * width
    num_blocks = -(-(num_drawn + _WORDS_OF_BLOCK - 1) // _WORDS_OF_BLOCK)
    words = torch.empty(num_rows, (num_blocks + 1) * _WORDS_OF_BLOCK + 16, dtype=torch.int32, device=streams.device)
    # If memory is too small, no stream has moved.
    out = torch.empty(num_rows, width, dtype=torch.float64, device=streams.device)
    launch(_streams(streams.shape[1]), (num_rows,), streams, slots, words, num_blocks, num_drawn)
    shares = _shares(min(_SHARES_BLOCK, power_of_two(width)))
    launch(shares, (num_rows, -(-width // _SHARES_BLOCK)), words, out, width, num_blocks)
    return out


def draw_tokens(scores: Tensor, probabilities: Tensor, numbers: Tensor, shares: Tensor, bits: int) -> Tensor:
    """Draws a token for each row, among the tokens that `launches.keep_nucleus` keeps.

    Args:
        scores: float32 `[R, V]`, which say which tokens are excluded first.
        probabilities: float32 `[R, V]`; equal scores of a row have equal ones.
        numbers: float32 `[R, V]`: the token with the largest quotient of probability and number is drawn.
        shares: int64 `[R]`, as those of `launches.keep_nucleus`; below 0 no token is excluded.
        bits: see `launches.keep_nucleus`.

    Returns:
        int64 `[R]`; of equal quotients, the first token is drawn. A row with NaN gets any token.
    """
    out = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    draw = _draw(bits, min(_TOKENS_BLOCK, power_of_two(scores.shape[1])))
    launch(draw, (len(scores),), scores, probabilities, numbers, shares, out, scores.shape[1])
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
    block = min(_SHARES_BLOCK, power_of_two(width))
    penalties = _penalties(are_seen is not None, counts is not None, block)
    seen = logits if are_seen is None else are_seen.view(torch.uint8)
    grid = (num_rows, -(-width // block))
    launch(penalties, grid, logits, seen, logits if counts is None else counts, settings, out, width)
    return out


@functools.cache
def _penalties(has_seen: bool, has_counts: bool, block: int) -> Variant:
    return variant(choice_code.penalise, HAS_SEEN=has_seen, HAS_COUNTS=has_counts, BLOCK=block, num_warps=4, **_EXACT)


@functools.cache
def _streams(width: int) -> Variant:
    return variant(choice_code.continue_streams, STREAM=width, LANES=256, num_warps=8)


@functools.cache
def _shares(block: int) -> Variant:
    return variant(choice_code.negated_shares, BLOCK=block, num_warps=4, **_EXACT)


@functools.cache
def _draw(bits: int, block: int) -> Variant:
    return variant(choice_code.draw_tokens, BITS=bits, BLOCK=block, num_warps=16, **_EXACT)
