"""The kernel that chooses tokens: the draw from the most probable tokens of a row.

All in it is exact. Random numbers and sums of probabilities are integers, and each operation on other numbers is
rounded as IEEE 754 says. So the results are those of a processor, and no row depends on the others.
"""

import triton
import triton.language as tl

from corolla.kernels.philox import (
    EVEN_TERMS,
    FRACTION,
    LN2_HIGH,
    LN2_LOW,
    ODD_TERMS,
    ONE,
    PROBABILITY_BITS,
    SQUARE_ROOT_OF_HALF,
)

_ODD_1 = tl.constexpr(ODD_TERMS[0])
_ODD_2 = tl.constexpr(ODD_TERMS[1])
_ODD_3 = tl.constexpr(ODD_TERMS[2])
_ODD_4 = tl.constexpr(ODD_TERMS[3])
_EVEN_1 = tl.constexpr(EVEN_TERMS[0])
_EVEN_2 = tl.constexpr(EVEN_TERMS[1])
_EVEN_3 = tl.constexpr(EVEN_TERMS[2])
_LN2_HIGH = tl.constexpr(LN2_HIGH)
_LN2_LOW = tl.constexpr(LN2_LOW)
_HALF_ROOT = tl.constexpr(SQUARE_ROOT_OF_HALF)
_TO_ONE = tl.constexpr(ONE - SQUARE_ROOT_OF_HALF)
_FRACTION = tl.constexpr(FRACTION)
_UNITS = tl.constexpr(1 << PROBABILITY_BITS)


@triton.jit
def _number(high, low):
    """The upper 52 bits of two words."""
    return (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)


@triton.jit
def _exponential(number):
    """See `philox.exponential_of`."""
    bits = (9007199254740991 - 2 * number).to(tl.float64).to(tl.int64, bitcast=True) + _TO_ONE
    exponent = ((bits >> 52) - 1076).to(tl.float64)
    f = ((bits & _FRACTION) + _HALF_ROOT).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (_EVEN_1 + w * (_EVEN_2 + w * _EVEN_3))
    odd = z * (_ODD_1 + w * (_ODD_2 + w * (_ODD_3 + w * _ODD_4)))
    half = f * f * 0.5
    logarithm = s * (half + (odd + even)) + exponent * _LN2_LOW - half + f + exponent * _LN2_HIGH
    return (-logarithm).to(tl.float32)


@triton.jit
def draw_tokens(probabilities, keys, positions, shares, least, out, width, BLOCK: tl.constexpr):
    """One program for each row: the token with the largest quotient of probability and number, among those that stay.

    The first tokens in the order of probability and id do not stay, as long as they have at most a share of probability
    together. A token that does not stay tells that no token before it does, so the next search leaves these out. A
    search more is rare.
    """
    row = tl.program_id(0).to(tl.int64)
    probabilities += row * width
    key, position = tl.load(keys + row), tl.load(positions + row).to(tl.int32)
    share, bar = tl.load(shares + row), tl.load(least + row)
    lane = tl.arange(0, BLOCK)
    pair = tl.arange(0, BLOCK // 2)
    nothing = tl.zeros((BLOCK // 2,), tl.int32)
    bound = tl.full((), -1.0, tl.float32)
    bound_at = tl.full((), 0, tl.int32)
    token = tl.full((), -1, tl.int32)
    goes_on = tl.full((), 1, tl.int32)
    while goes_on > 0:
        best = tl.full((), 0.0, tl.float32)
        token = tl.full((), -1, tl.int32)
        for start in range(0, width, BLOCK):
            at = start + lane
            part = tl.load(probabilities + at, mask=at < width, other=0.0)
            w0, w1, w2, w3 = tl.philox(key, nothing + position, start // 2 + pair, nothing, nothing)
            number = tl.interleave(_number(w0, w1), _number(w2, w3))
            is_left = (part >= bar) & ((part > bound) | ((part == bound) & (at > bound_at)))
            # An exponential number is at least the evenly drawn one, but for its rounding: so few tokens need it.
            even = (number >> 28).to(tl.float32) * 5.9604644775390625e-08
            may_win = is_left & (part >= best * even * 0.999999)
            if tl.max(may_win.to(tl.int32), 0) > 0:
                quotient = tl.where(is_left, tl.div_rn(part, _exponential(number)), 0.0)
                largest = tl.max(quotient, 0)
                if largest > best:
                    best = largest
                    token = tl.min(tl.where(quotient == largest, at, width), 0)
        # Where a row has numbers that are not finite, no quotient is found.
        goes_on = tl.full((), 0, tl.int32)
        if (token >= 0) & (share >= 0):
            bound, bound_at = tl.load(probabilities + token), token
            below = tl.zeros((BLOCK,), tl.int64)
            every = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, width, BLOCK):
                at = start + lane
                part = tl.load(probabilities + at, mask=at < width, other=0.0)
                units = (part.to(tl.float64) * _UNITS).to(tl.int64)
                below += tl.where((part < bound) | ((part == bound) & (at <= bound_at)), units, 0)
                every += units
            # The last token stays, however large the share is.
            goes_on = (tl.sum(below, 0) <= tl.minimum(share, tl.sum(every, 0) - 1)).to(tl.int32)
    tl.store(out + row, token.to(tl.int64))
