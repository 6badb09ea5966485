"""The top-p filter of a GPU, for which no row depends on the other rows of a batch.

Sums of integers do not depend on the order of the additions, which on a GPU depends on the number of rows.
"""

from typing import Final

import torch
from torch import Tensor

from corolla.kernels.triton.availability import missing

PROBABILITY_BITS: Final = 52
"""Probabilities are integers of so many bits; a sum of them is below two to the power of 63."""

_SCALE: Final = float(1 << PROBABILITY_BITS)


def keep_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Excludes the least probable tokens of each row, as long as they have at most its share of probability together.

    Among equal scores, those of the lower indices are excluded first. The most probable token stays.

    Args:
        scores: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        float32 `[R, V]`, on the same device: the scores, with minus Inf for excluded tokens.
    """
    if scores.device.type != "cuda" or missing() is not None:
        return sorted_nucleus(scores, shares)
    from corolla.kernels.triton import launches

    units = (shares[:, 0].double() * _SCALE).long()
    return launches.keep_nucleus(scores.contiguous(), scores.softmax(dim=-1), units, PROBABILITY_BITS)


def sorted_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """What `keep_nucleus` returns, by a sort of each row; for devices without Triton.

    Args:
        scores: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        float32 `[R, V]`, on the same device.
    """
    indices = scores.argsort(stable=True)
    is_removed = within_shares(scores.softmax(dim=-1).gather(1, indices), shares)
    is_removed.select(1, -1).fill_(False)
    return scores.masked_fill(is_removed.scatter(1, indices, is_removed), -torch.inf)


def within_shares(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Which first tokens of each row together have at most the row's share of probability.

    Args:
        probabilities: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        bool `[R, V]`, on the same device.
    """
    return (probabilities.double() * _SCALE).long().cumsum(dim=-1) <= (shares.double() * _SCALE).long()
