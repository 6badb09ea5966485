"""The top-p filter of a GPU, and the draw from what it keeps, for which no row depends on the other rows of a batch.

Sums of integers do not depend on the order of the additions, which on a GPU depends on the number of rows.
"""

import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from corolla.decoding import kernel_trials
from corolla.wire.device_copies import to_device

PROBABILITY_BITS: Final = 52
"""Probabilities are integers of so many bits; a sum of them is below two to the power of 63."""

NO_SHARE: Final = -1.0
"""A row with this share excludes no token."""

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""See `launched_draw`."""

Keep = Callable[[Tensor, Tensor], Tensor]
"""See `keep_nucleus`."""

_SCALE: Final = float(1 << PROBABILITY_BITS)
_TRIAL_ROWS: Final = 9
_TRIAL_TOKENS: Final = 10_000


def drawn_from_nucleus(scores: Tensor, numbers: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Draws a token for each row: that with the largest quotient of probability and number, among those that stay.

    Args:
        scores: float32 `[R, V]`; some are finite in each row. A row with NaN gets any token.
        numbers: float32 `[R, V]`, on the same device, exponentially distributed.
        shares: as those of `keep_nucleus`, which says which tokens stay; or NO_SHARE.

    Returns:
        int64 `[R]`, on the same device.
    """
    probabilities, units = scores.softmax(dim=-1), _units_of(shares, scores.device)
    draw = launched_draw if draw_kernel_holds(scores.device) else draw_by_filter
    return draw(scores.contiguous(), probabilities, numbers, units)


def launched_draw(scores: Tensor, probabilities: Tensor, numbers: Tensor, units: Tensor) -> Tensor:
    """Computes by the Triton kernel what `drawn_from_nucleus` returns, of tensors on one device.

    Args:
        scores: float32 `[R, V]`.
        probabilities: float32 `[R, V]`.
        numbers: float32 `[R, V]`.
        units: int64 `[R]`, the shares times two to the power of PROBABILITY_BITS.

    Returns:
        int64 `[R]`.
    """
    from corolla.kernels.triton import choice_launches

    return choice_launches.draw_tokens(scores, probabilities, numbers, units, PROBABILITY_BITS)


def draw_by_filter(scores: Tensor, probabilities: Tensor, numbers: Tensor, units: Tensor) -> Tensor:
    """Computes by operators what `launched_draw` returns; see `launched_draw`."""
    keep = _launched if _kernel_holds(scores.device) else _sorted
    is_excluded = keep(scores, probabilities, units) == -torch.inf
    return (probabilities.masked_fill(is_excluded, 0.0) / numbers).argmax(dim=-1)


@functools.lru_cache(maxsize=64)
def _units_of(shares: tuple[float, ...], device: torch.device) -> Tensor:
    return to_device(_units(torch.tensor(shares, dtype=torch.float32)), device, torch.int64)


def _units(shares: Tensor) -> Tensor:
    return (shares.double() * _SCALE).long()


@functools.cache
def draw_kernel_holds(device: torch.device) -> bool:
    """Returns True if a kernel draws on a device. The first call tries the kernel."""
    return kernel_trials.holds("a draw from the most probable tokens", "operators draw", device, draws_as_operators)


def draws_as_operators(device: torch.device, draw: Draw = launched_draw) -> bool:
    """Returns True if `draw` draws the tokens that operators draw."""
    scores, shares = _trial_rows(device)
    probabilities, units = scores.softmax(dim=-1), _units(shares[:, 0])
    units[-1] = _units(torch.tensor(NO_SHARE))
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        numbers = torch.empty(scores.shape).exponential_(generator=generator).to(device)
        if not torch.equal(
            draw(scores, probabilities, numbers, units), draw_by_filter(scores, probabilities, numbers, units)
        ):
            return False
    return True


def keep_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Excludes the least probable tokens of each row, as long as they have at most its share of probability together.

    Of tokens with equal scores, it excludes the one with the lowest index first. The most probable token stays.

    Args:
        scores: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        float32 `[R, V]`, on the same device: the scores, with minus Inf for excluded tokens.
    """
    return (launched_nucleus if _kernel_holds(scores.device) else sorted_nucleus)(scores, shares)


def launched_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Computes by the Triton kernel what `keep_nucleus` returns; see `keep_nucleus`."""
    return _launched(scores.contiguous(), scores.softmax(dim=-1), _units(shares[:, 0]))


def _launched(scores: Tensor, probabilities: Tensor, units: Tensor) -> Tensor:
    from corolla.kernels.triton import launches

    return launches.keep_nucleus(scores, probabilities, units, PROBABILITY_BITS)


@functools.cache
def _kernel_holds(device: torch.device) -> bool:
    return kernel_trials.holds("top-p", "a sort of each row takes its place", device, keeps_as_a_sort)


def keeps_as_a_sort(device: torch.device, keep: Keep = launched_nucleus) -> bool:
    """Compares what a kernel keeps with what a sort keeps."""
    scores, shares = _trial_rows(device)
    return torch.equal(keep(scores, shares), sorted_nucleus(scores, shares))


def _trial_rows(device: torch.device) -> tuple[Tensor, Tensor]:
    """Scores and shares. Many scores are equal, and some are excluded already."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(_TRIAL_ROWS, _TRIAL_TOKENS, generator=generator).mul(8).round().div(4)
    return (
        scores.masked_fill(scores < -1, -torch.inf).to(device),
        torch.linspace(0.0, 1.0, _TRIAL_ROWS, device=device)[:, None],
    )


def sorted_nucleus(scores: Tensor, shares: Tensor) -> Tensor:
    """Computes by a sort of each row, for devices without Triton, what `keep_nucleus` returns; see `keep_nucleus`."""
    return _sorted(scores, scores.softmax(dim=-1), _units(shares[:, 0]))


def _sorted(scores: Tensor, probabilities: Tensor, units: Tensor) -> Tensor:
    indices = scores.argsort(stable=True)
    is_removed = _within(probabilities.gather(1, indices), units)
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
    return _within(probabilities, _units(shares[:, 0]))


def _within(probabilities: Tensor, units: Tensor) -> Tensor:
    return _units(probabilities).cumsum(dim=-1) <= units.unsqueeze(1)
