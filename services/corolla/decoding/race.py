"""The race in which tokens are drawn, among those that top-p and min-p keep. No row depends on the others.

Each token has a number that follows from the answer's seed, the token's position and its id. The token with
the largest quotient of probability and number wins; of equal quotients, the lowest id.

Probabilities are integers of 52 bits for top-p, so that their sums do not depend on the order of the additions. In the
order of probability and then of id, top-p excludes the first tokens that together have at most the share `1 - top_p`;
the last token always stays. Min-p keeps tokens with at least a share of the highest probability: its bound does not
depend on what top-p excludes.

The numbers are a function, Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). So there
is no stream and no state: every server that chooses the token at a position has the same numbers. One call of Philox
gives two words to each of two tokens. Operators compute with integers of torch, on any device; compiled functions and
kernels give the same bits.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from corolla.kernels import draws
from corolla.kernels.compiler import why_unavailable
from corolla.kernels.kernel_trial import failure_of
from corolla.kernels.philox import (
    EVEN_TERMS,
    FRACTION,
    KEY_STEPS,
    LN2_HIGH,
    LN2_LOW,
    MULTIPLIERS,
    NUMBER_BITS,
    ODD_TERMS,
    ONE,
    PROBABILITY_BITS,
    ROUNDS,
    SQUARE_ROOT_OF_HALF,
)
from corolla.kernels.triton.availability import missing
from corolla.wire.device_copies import copied_numbers, on_device

log = logging.getLogger(__name__)

Draw = Callable[[Tensor, "Racers"], Tensor]
"""See `drawn`."""

_UNITS: Final = 1 << PROBABILITY_BITS
_TRIAL_ROWS: Final = 9
_TRIAL_TOKENS: Final = 10_000


class Racers(NamedTuple):
    """How each row draws; all tensors are on the device of the probabilities.

    Attributes:
        keys: int64 `[R]`, the bits of the seeds.
        positions: int64 `[R]`: where in its answer each token is.
        shares: int64 `[R]`: what top-p excludes, in units of probability; a negative number: nothing.
        least: float32 `[R]`: less probable tokens do not race.
    """

    keys: Tensor
    positions: Tensor
    shares: Tensor
    least: Tensor


def racers(
    probabilities: Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> Racers:
    """How rows of probabilities, float32 `[R, V]` on any device, draw. All sequences have an entry for each row.

    Args:
        seeds: of 64 bits.
    """
    device = probabilities.device
    keys = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in seeds]
    own_keys, own_positions = copied_numbers([(keys, torch.int64), (positions, torch.int64)], device)
    shares = on_device(tuple(-1 if each == 1 else int((1 - each) * _UNITS) for each in top_p), device, torch.int64)
    least = on_device(tuple(min_p), device, torch.float32)
    if any(min_p):
        least = least * probabilities.amax(dim=-1)
    return Racers(own_keys, own_positions, shares, least)


def drawn(probabilities: Tensor, own: Racers) -> Tensor:
    """Draws a token for each row of probabilities, float32 `[R, V]`.

    Returns:
        int64 `[R]`, on the same device; -1 for a row that is not finite.
    """
    return way_of(probabilities.device)(probabilities, own)


@functools.cache
def way_of(device: torch.device) -> Draw:
    """What draws on a device. The first call tries the kernel of a GPU."""
    if device.type == "cpu":
        return drawn_by_operators if why_unavailable() else drawn_by_function
    if device.type != "cuda":
        return drawn_by_operators
    failure = missing() or failed_trial(device, draws_as_operators)
    if failure is None:
        return drawn_by_kernel
    log.warning("operators draw tokens, since the kernel is not used", extra={"failure": failure})
    return drawn_by_operators


def failed_trial(device: torch.device, has_equal_results: Callable[[torch.device], bool]) -> str | None:
    """Returns why a kernel does not hold on a device: it fails, or its results differ; None: it holds."""
    return failure_of(lambda: None if has_equal_results(device) else "its results differ")


def drawn_by_function(probabilities: Tensor, own: Racers) -> Tensor:
    """Computes by a compiled function what `drawn` returns of probabilities, float32 `[R, V]` on a CPU: int64 `[R]`."""
    return draws.draw_tokens(probabilities.contiguous(), *own)


def drawn_by_kernel(probabilities: Tensor, own: Racers) -> Tensor:
    """Computes by the Triton kernel what `drawn` returns of probabilities, float32 `[R, V]` on a GPU: int64 `[R]`."""
    from corolla.kernels.triton import choice_launches

    return choice_launches.draw_tokens(probabilities.contiguous(), *own)


def drawn_by_operators(probabilities: Tensor, own: Racers) -> Tensor:
    """Computes by operators, on any device, what `drawn` returns of probabilities, float32 `[R, V]`: int64 `[R]`."""
    # A stable order keeps equal probabilities in the order of their ids.
    indices = probabilities.argsort(dim=-1, stable=True)
    sums = (probabilities.double() * _UNITS).long().gather(1, indices).cumsum(dim=-1)
    are_first = sums <= torch.minimum(own.shares.unsqueeze(1), sums[:, -1:] - 1)
    are_excluded = are_first.scatter(1, indices, are_first) | (probabilities < own.least.unsqueeze(1))
    numbers = exponential_numbers(own.keys, own.positions, probabilities.shape[1])
    best = (probabilities.masked_fill(are_excluded, 0.0) / numbers).max(dim=-1)
    return torch.where(best.values > 0, best.indices, -1)


def draws_as_operators(device: torch.device, draw: Draw = drawn_by_kernel) -> bool:
    """Returns True if `draw` draws the tokens that operators draw. Many probabilities are equal, and some are 0."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(_TRIAL_ROWS, _TRIAL_TOKENS, generator=generator).mul(8).round().div(4)
    probabilities = scores.masked_fill(scores < -1, -torch.inf).softmax(dim=-1).to(device)
    top_p = [1.0, *(index / _TRIAL_ROWS for index in range(1, _TRIAL_ROWS))]
    min_p = [0.0, 0.1, *[0.0] * (_TRIAL_ROWS - 2)]
    for position in range(4):
        seeds = [(1 << 64) - 1 - index for index in range(_TRIAL_ROWS)]
        own = racers(probabilities, seeds, [position] * _TRIAL_ROWS, top_p, min_p)
        if not torch.equal(draw(probabilities, own), drawn_by_operators(probabilities, own)):
            return False
    return True


_WORD: Final = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The four words that Philox4x32-10 makes of a counter and a key.

    Args:
        counter: four words, int64 of any shapes that fit each other, between 0 and 2^32, on any device.
        key: two words, int64 likewise, of any shapes that fit those of the counter, on the same device.

    Returns:
        Four words, int64 of the same shape, on the same device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Products wrap around as integers of 64 bits do; a mask takes their sign away.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> 32) & _WORD ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32) & _WORD ^ c3 ^ k1, first & _WORD
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def even_numbers(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """The evenly drawn numbers of the first `width` tokens, integers of 52 bits.

    Args:
        keys: int64 `[R]`, the bits of the seeds.
        positions: int64 `[R]`, on the same device: where in its answer each token is.

    Returns:
        int64 `[R, width]`, on that device.
    """
    pairs = torch.arange((width + 1) // 2, device=keys.device)
    nothing = torch.zeros_like(pairs)
    counter = (positions.unsqueeze(1) & _WORD, pairs, nothing, nothing)
    w0, w1, w2, w3 = philox(counter, (keys.unsqueeze(1) & _WORD, (keys.unsqueeze(1) >> 32) & _WORD))
    even, odd = ((high << 20) | (low >> 12) for high, low in ((w0, w1), (w2, w3)))
    return torch.stack((even, odd), dim=-1).flatten(1)[:, :width]


def exponential_of(numbers: Tensor) -> Tensor:
    """Exponentially distributed numbers: the negated logarithms of `1 - u`, where `u = (number + 1/2) / 2^52`.

    Args:
        numbers: int64 of any shape, on any device, as `even_numbers` returns them.

    Returns:
        float32 of the same shape, on that device; none is 0 or infinite. The logarithm is computed in float64.
    """
    # `1 - u` is an odd number of 53 bits, divided by 2^53, which float64 holds exactly.
    bits = ((1 << (NUMBER_BITS + 1)) - 1 - 2 * numbers).double().view(torch.int64) + (ONE - SQUARE_ROOT_OF_HALF)
    exponent = ((bits >> 52) - (1023 + NUMBER_BITS + 1)).double()
    f = ((bits & FRACTION) + SQUARE_ROOT_OF_HALF).view(torch.float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (EVEN_TERMS[0] + w * (EVEN_TERMS[1] + w * EVEN_TERMS[2]))
    odd = z * (ODD_TERMS[0] + w * (ODD_TERMS[1] + w * (ODD_TERMS[2] + w * ODD_TERMS[3])))
    half = f * f * 0.5
    return (s * (half + (odd + even)) + exponent * LN2_LOW - half + f + exponent * LN2_HIGH).neg().float()


def exponential_numbers(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """The exponentially distributed numbers of the first `width` tokens, float32 `[R, width]`; see `even_numbers`.

    `keys` and `positions` are int64 `[R]` on one device.
    """
    return exponential_of(even_numbers(keys, positions, width))
