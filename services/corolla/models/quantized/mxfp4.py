"""MXFP4 (OCP Microscaling Formats), the format of gpt-oss' experts: 32 numbers of four bits share a power of two."""

from collections.abc import Mapping
from typing import ClassVar, Final

from torch import Tensor

from corolla.models.quantized.floats import e2m1, scale_numbers
from corolla.models.quantized.format import Format
from corolla.models.quantized.stored_tensors import StoredTensors, allow, expect, shape_of

_OCTETS: Final = 16


class Mxfp4(Format):
    """MXFP4 stores experts as `blocks` uint8 `[experts, out, groups, 16]`, `scales` uint8 `[experts, out, groups]`."""

    endings: ClassVar[Mapping[str, str]] = {"_blocks": "", "_scales": ""}

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        """The shape in the family's own code, `[experts, in, out]`. Raises Unfit."""
        allow(stored, "blocks", "scales")
        num_experts, num_outputs, num_groups, _ = shape = shape_of(stored, "blocks", {"U8"}, 4)
        expect(stored, "blocks", {"U8"}, (*shape[:3], _OCTETS))
        expect(stored, "scales", {"U8"}, shape[:3])
        return num_experts, num_groups * 2 * _OCTETS, num_outputs

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The weights of some experts, float32 `[end - start, in, out]`. See `Format.rows`."""
        scales = scale_numbers(tensors["scales"][start:end])
        return e2m1(tensors["blocks"][start:end]).mul_(scales.unsqueeze(-1)).flatten(2).transpose(1, 2)
