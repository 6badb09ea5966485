"""The top-p filter of a GPU, for which no row depends on the other rows of a batch.

Sums of integers do not depend on the order of the additions, which on a GPU depends on the number of rows.
"""

import functools
import logging
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.triton.availability import missing

log = logging.getLogger(__name__)

PROBABILITY_BITS: Final = 52
"""Probabilities are integers of so many bits; a sum of them is below two to the power of 63."""

_SCALE: Final = float(1 << PROBABILITY_BITS)
_TRIAL_ROWS: Final = 9
_TRIAL_TOKENS: Final = 10_000


def keep_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Excludes the least probable tokens of each row, as long as they have at most its share of probability together.

    Of tokens with equal scores, it excludes the one with the lowest index first. The most probable token stays.

    Args:
        scores: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        float32 `[R, V]`, on the same device: the scores, with minus Inf for excluded tokens.
    """
    if scores.device.type != "cuda" or not _kernel_holds(scores.device):
        return sorted_nucleus(scores, shares)
    return launched_nucleus(scores, shares)


def launched_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Computes by the Triton kernel what `keep_nucleus` returns; see `keep_nucleus`."""
    from corolla.kernels.triton import launches

    units = (shares[:, 0].double() * _SCALE).long()
    return launches.keep_nucleus(scores.contiguous(), scores.softmax(dim=-1), units, PROBABILITY_BITS)


@functools.cache
def _kernel_holds(device: torch.device) -> bool:
    """Tries the kernel when a device draws its first token. Returns whether its results are those of sorts."""
    failure = missing() or failed_trial(device)
    if failure is not None:
        log.warning("a sort of each row takes the place of the kernel for top-p", extra={"failure": failure})
    return failure is None


def failed_trial(device: torch.device) -> str | None:
    """Compares the kernel with sorts. Returns what failed, or None."""
    generator = torch.Generator().manual_seed(0)
    # Many scores are equal, and some are excluded already.
    scores = torch.randn(_TRIAL_ROWS, _TRIAL_TOKENS, generator=generator).mul(8).round().div(4)
    scores = scores.masked_fill(scores < -1, -torch.inf).to(device)
    shares = torch.linspace(0.0, 1.0, _TRIAL_ROWS, device=device)[:, None]
    try:
        found, expected = launched_nucleus(scores, shares), sorted_nucleus(scores, shares)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        # Compilers raise errors of many kinds, and a sort works without them.
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None if torch.equal(found, expected) else "its results differ"


def sorted_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Computes by a sort of each row, for devices without Triton, what `keep_nucleus` returns; see `keep_nucleus`."""
    indices = scores.argsort(stable=True)
    is_removed = within_shares(scores.softmax(dim=-1).gather(1, indices), shares)
    is_removed.select(1, -1).fill_(False)
    return scores.masked_fill(is_removed.scatter(1, indices, is_removed), -torch.inf)


def within_shares(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Marks the first tokens of each row that together have at most the row's share of probability.

    Args:
        probabilities: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        bool `[R, V]`, on the same device.
    """
    return (probabilities.double() * _SCALE).long().cumsum(dim=-1) <= (shares.double() * _SCALE).long()
