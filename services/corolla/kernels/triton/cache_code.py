"""Keys and values in 8 bits, in Triton's language: the codes of `cache.codecs`, bit for bit, and the numbers of codes.

All of it is arithmetic with the bits of float32, so it is the same on every device: GPUs before compute capability 8.9
have no instruction for E4M3, and divisions and powers are not exact everywhere.
"""

import triton
import triton.language as tl

# The bits of float32: 448, the largest number of E4M3; 2^-6, its smallest normal one; Inf.
_LARGEST_FP8 = tl.constexpr(0x43E00000)
_NORMAL_FP8 = tl.constexpr(0x3C800000)
_INFINITE = tl.constexpr(0x7F800000)
# 2^14 and its bits: its last bit is worth 2^-9 as that of the subnormal numbers of E4M3, so adding it rounds them.
_SUBNORMAL = tl.constexpr(16384.0)
_SUBNORMAL_BITS = tl.constexpr(0x46800000)
# The exponents of float32 and E4M3 differ by so much; their mantissas by 20 bits.
_EXPONENTS_APART = tl.constexpr(120 << 23)
_UP_FROM_FP8 = tl.constexpr(2.0**120)
# A float32 with these bits, 2^23, holds a whole number in its lowest bits: GPUs convert integers far more slowly.
_WHOLE_BITS = tl.constexpr(0x4B000000)
# That number less 128, for codes whose sign was turned to make them positive.
_WHOLE = tl.constexpr(8388736.0)
# Added and subtracted, it rounds to whole numbers, halves to even ones.
_ROUNDING = tl.constexpr(12582912.0)
_NOT_FINITE = tl.constexpr(-128)


@triton.jit
def store_head(target, value, inside, HEAD: tl.constexpr, CODEC: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a head of a token, `value` `[BLOCK]` with zeros from HEAD on, at `target`."""
    at = tl.arange(0, BLOCK)
    if CODEC == "":
        tl.store(target + at, value, mask=inside)
    elif CODEC == "fp8":
        tl.store(target + at, _fp8_codes(value), mask=inside)
    else:
        tl.static_assert(CODEC == "int8", "a codec without a kernel")
        codes, exponent = _int8_codes(value)
        tl.store(target + at, codes, mask=inside)
        tl.store(target + HEAD, exponent)


@triton.jit
def decoded(codes, exponents, dtype: tl.constexpr, CODEC: tl.constexpr):
    """The numbers of codes, int8 `[T, H]`, in a dtype; `exponents`, int8 `[T]`, are read for int8 only."""
    code = _integers(codes)
    if CODEC == "fp8":
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        wide = bits.to(tl.float32, bitcast=True) * _UP_FROM_FP8
        wide = tl.where((code & 0x7F) == 0x7F, float("nan"), wide)
    else:
        exponent = _integers(exponents)
        unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        unit = tl.where(exponent == _NOT_FINITE, float("nan"), unit)
        whole = (((code & 0xFF) ^ 0x80) | _WHOLE_BITS).to(tl.float32, bitcast=True) - _WHOLE
        wide = whole * unit[:, None]
    return wide.to(dtype)


@triton.jit
def _integers(codes):
    """Signed bytes as int32.

    Where numbers of 8 bits reach a product through single operations, Triton gives each tensor core instruction other
    columns, and rounds other sums than the product of stored numbers. The sum of one number ends its search.
    """
    return tl.sum(tl.expand_dims(codes.to(tl.int32), 0), 0)


@triton.jit
def _fp8_codes(value):
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > _INFINITE
    size = tl.minimum(size, _LARGEST_FP8)
    subnormal = (size.to(tl.float32, bitcast=True) + _SUBNORMAL).to(tl.int32, bitcast=True) - _SUBNORMAL_BITS
    normal = (size - _EXPONENTS_APART + 0x7FFFF + ((size >> 20) & 1)) >> 20
    code = tl.where(size < _NORMAL_FP8, subnormal, normal)
    return (tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _int8_codes(value):
    wide = value.to(tl.float32)
    largest = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    # The least exponent with which the largest number has a code: 127 is 1.984375 times 2^6.
    exponent = (largest >> 23) - 133 + ((largest & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 120)
    # A 127th of such a number is zero in float32.
    exponent = tl.where(largest <= 63, 0, exponent)
    is_finite = largest < _INFINITE
    scaled = wide * ((127 - tl.where(is_finite, exponent, 0)) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(tl.where(scaled == scaled, scaled, 0.0), -127.0), 127.0)
    codes = (scaled + _ROUNDING) - _ROUNDING
    return codes.to(tl.int8), tl.where(is_finite, exponent, _NOT_FINITE).to(tl.int8)
