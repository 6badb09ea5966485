"""Keys and values in eight bits: how they are written to pages and read from them.

Whatever a server attends to it reads as it is stored, also the tokens of the very chunk that it computes; and what was
read is stored as the same bytes again. So answers depend neither on how a prompt was cut nor on a handover. Where keys
are computed again in other company, their last bits may differ, and then one of them may be rounded the other way.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

_LARGEST_FP8: Final = torch.finfo(torch.float8_e4m3fn).max
_LARGEST_INT8: Final = 127
# Beyond them float32 has no numbers for all codes.
_LEAST_EXPONENT, _GREATEST_EXPONENT = -126, 120
# In place of an exponent: what was computed is not finite, which whoever attends to it has to notice.
_NOT_FINITE: Final = -128


class KVCodec(Protocol):
    """One way to store keys or values."""

    dtype: torch.dtype
    """Of the numbers that are read."""

    def stored_size(self, head_size: int) -> int:
        """Bytes of one head of one token."""
        ...

    def encode(self, numbers: Tensor) -> Tensor:
        """Floats `[..., head_size]` to int8 `[..., stored_size]`."""
        ...

    def decode(self, stored: Tensor) -> Tensor:
        """The numbers that bytes stand for, `[..., head_size]`; `encode` gives the same bytes for them again."""
        ...


class Fp8Codec:
    """E4M3: three bits of mantissa. What is larger than 448 becomes 448."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def stored_size(self, head_size: int) -> int:
        return head_size

    def encode(self, numbers: Tensor) -> Tensor:
        return numbers.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.int8)

    def decode(self, stored: Tensor) -> Tensor:
        return stored.view(torch.float8_e4m3fn).to(self.dtype)


class Int8Codec:
    """Integers, and for each token and head a power of two that they are multiplied by: its exponent is the last byte.

    Powers of two lose half a bit, and products with them are exact.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # The smallest units are none of float16's.
        self._exact = torch.float32 if dtype == torch.float16 else dtype

    def stored_size(self, head_size: int) -> int:
        return head_size + 1

    def encode(self, numbers: Tensor) -> Tensor:
        largest = numbers.abs().amax(dim=-1, keepdim=True).float()
        exponents = torch.frexp(largest / _LARGEST_INT8).exponent.clamp(_LEAST_EXPONENT, _GREATEST_EXPONENT)
        codes = torch.ldexp(numbers.float(), -exponents).round().nan_to_num().clamp(-_LARGEST_INT8, _LARGEST_INT8)
        exponents = torch.where(largest.isfinite(), exponents, _NOT_FINITE)
        return torch.cat([codes, exponents.to(codes)], dim=-1).to(torch.int8)

    def decode(self, stored: Tensor) -> Tensor:
        exponents = stored[..., -1:].int()
        ones = torch.ones_like(exponents, dtype=torch.float32)
        units = torch.ldexp(ones, exponents.clamp(_LEAST_EXPONENT, _GREATEST_EXPONENT))
        units = units.masked_fill_(exponents == _NOT_FINITE, torch.nan).to(self._exact)
        return stored[..., :-1].to(self._exact).mul_(units).to(self.dtype)


CODECS: Final[Mapping[str, Callable[[torch.dtype], KVCodec]]] = {"fp8": Fp8Codec, "int8": Int8Codec}
"""By COROLLA_KV_CACHE_DTYPE; `auto` has none: keys and values are stored in the dtype of the weights."""
