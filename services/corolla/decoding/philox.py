"""Random numbers as a function: Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3").

The number of a token follows from the answer's seed, the token's position in the answer and the token's id. So there is
no stream and no state: every server that chooses the token at a position has the same numbers. One call of Philox gives
two words to each of two tokens.

This module computes with integers of torch, on any device. Compiled functions and kernels give the same bits.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

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
    ROUNDS,
    SQUARE_ROOT_OF_HALF,
)

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
