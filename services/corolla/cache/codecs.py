"""Stores keys and values in eight bits, and reads them back.

Attention always reads stored numbers, even those of the chunk that is being computed. Numbers that were decoded and are
encoded again become the same bytes. So an answer depends neither on how its prompt was cut into chunks nor on whether
its session was handed over. But if keys are computed again in a batch with other rows, their last bits may differ, and
a stored number may then round the other way.

The Triton kernels store the same codes (`kernels.triton.cache_code`), so a session may move between devices.

E4M3 is the format of Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Integers with a shared power of two are
a block floating point format, as the OCP Microscaling Formats are.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

_LARGEST_FP8: Final = torch.finfo(torch.float8_e4m3fn).max
_LARGEST_INT8: Final = 127
# If an exponent is outside of this range, float32 cannot represent the products of its power of two with all codes.
_LEAST_EXPONENT, _GREATEST_EXPONENT = -126, 120
# This value in place of an exponent means that some numbers of the head were not finite. All of them are decoded as
# NaN, so that later checks find out.
_NOT_FINITE: Final = -128


class KVCodec(Protocol):
    """A way to store keys or values as int8."""

    name: str
    """The codec's key in CODECS."""
    dtype: torch.dtype
    """The dtype of the numbers that `decode` returns."""

    def stored_size(self, head_size: int) -> int:
        """The number of bytes of one head of one token."""
        ...

    def encode(self, numbers: Tensor) -> Tensor:
        """Converts `numbers`, floats `[..., head_size]` of any dtype, to int8 `[..., stored_size]` on their device."""
        ...

    def decode(self, stored: Tensor) -> Tensor:
        """Converts `stored`, int8 `[..., stored_size]`, to `[..., head_size]` in the codec's dtype, on the same device.

        If the result is encoded again, it becomes the same bytes.
        """
        ...


class Fp8Codec:
    """Stores numbers as E4M3, with three bits of mantissa. Numbers beyond 448 become 448."""

    name = "fp8"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def stored_size(self, head_size: int) -> int:
        return head_size

    def encode(self, numbers: Tensor) -> Tensor:
        """See `KVCodec.encode`."""
        return numbers.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.int8)

    def decode(self, stored: Tensor) -> Tensor:
        """See `KVCodec.decode`."""
        return stored.view(torch.float8_e4m3fn).to(self.dtype)


class Int8Codec:
    """Stores integers and, for each token and head, a power of two to multiply them by; its exponent is the last byte.

    A power of two loses about half a bit of precision against the best factor, but products with it are exact.
    """

    name = "int8"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # float16 cannot represent the smallest powers of two, so their products are computed in float32.
        self._exact = torch.float32 if dtype == torch.float16 else dtype

    def stored_size(self, head_size: int) -> int:
        return head_size + 1

    def encode(self, numbers: Tensor) -> Tensor:
        """See `KVCodec.encode`."""
        largest = numbers.abs().amax(dim=-1, keepdim=True).float()
        # The largest number would have no code if the exponent were smaller; 127 is 1.984375 times 2^6. Bits give the
        # exponent exactly on every device; powers and quotients might not.
        bits = largest.view(torch.int32)
        exponents = (bits >> 23) - 133 + ((bits & 0x7FFFFF) > 0x7E0000).int()
        exponents = exponents.clamp(_LEAST_EXPONENT, _GREATEST_EXPONENT)
        # A 127th of such a number is zero in float32.
        exponents = exponents.masked_fill(bits <= 63, 0)
        is_finite = largest.isfinite()
        codes = numbers.float() * _power_of_two(-exponents.masked_fill(~is_finite, 0))
        codes = codes.round().nan_to_num().clamp(-_LARGEST_INT8, _LARGEST_INT8)
        exponents = torch.where(is_finite, exponents, _NOT_FINITE)
        return torch.cat([codes, exponents.to(codes)], dim=-1).to(torch.int8)

    def decode(self, stored: Tensor) -> Tensor:
        """See `KVCodec.decode`."""
        exponents = stored[..., -1:].int()
        units = _power_of_two(exponents.clamp(_LEAST_EXPONENT, _GREATEST_EXPONENT))
        units = units.masked_fill_(exponents == _NOT_FINITE, torch.nan).to(self._exact)
        return stored[..., :-1].to(self._exact).mul_(units).to(self.dtype)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Two to the power of `exponents`, int32 from -126 to 127: exact float32 of the same shape, on the same device."""
    return ((exponents + 127) << 23).view(torch.float32)


CODECS: Final[Mapping[str, Callable[[torch.dtype], KVCodec]]] = {"fp8": Fp8Codec, "int8": Int8Codec}
"""The codecs by their names in COROLLA_KV_CACHE_DTYPE. `auto` uses no codec: keys and values are stored in the dtype of
the weights."""
