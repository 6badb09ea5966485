"""Numbers and scales of four and eight bits, as in the OCP Microscaling Formats. All tensors are on the CPU."""

from typing import Final

import torch
from torch import Tensor

# E2M1: a bit for the sign, two for the exponent, one for the mantissa.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

FLOATS: Final = frozenset({"F16", "BF16", "F32", "F64"})
"""Types of ordinary weights and scales, by safetensors' names."""
FLOATS_OF_8_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2"})
SCALES: Final = FLOATS | FLOATS_OF_8_BITS | {"F8_E8M0", "U8"}
"""Types of scales; a U8 is an exponent, like an F8_E8M0."""


def nibbles(octets: Tensor) -> Tensor:
    """Splits the bytes `octets`, uint8 `[..., N]`, into halves, uint8 `[..., 2 N]`, the lower four bits first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def e2m1(octets: Tensor) -> Tensor:
    """Expands `octets` of two E2M1 numbers each, uint8 `[..., N]`, to float32 `[..., 2 N]`."""
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    return table[nibbles(octets).int()]


def scale_numbers(scales: Tensor) -> Tensor:
    """The `scales`, of any shape, as float32; a uint8 `b` stands for 2 to the power of `b - 127`."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
