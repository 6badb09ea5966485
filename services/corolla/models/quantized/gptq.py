"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it, with and without activation order.

`qweight` packs several inputs into one int32; `qzeros` packs several outputs. With activation order, the inputs of a
group are not adjacent, and `g_idx` is the group of each input.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from corolla.kernels.layouts import Layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.description import Scheme
from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.format import Format
from corolla.models.quantized.groups import input_order, layout_of_groups, numbers_of_blocks
from corolla.models.quantized.integers import num_words, unpacked
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit, allow, expect, need, shape_of


class Gptq(Format):
    """GPTQ stores a weight as `qweight` int32 `[in * bits / 32, out]`, `qzeros` int32 `[groups, out * bits / 32]`,
    `scales` `[groups, out]`, and sometimes `g_idx` int32 `[in]`.
    """

    endings: ClassVar[Mapping[str, str]] = {
        ".qweight": ".weight",
        ".qzeros": ".weight",
        ".scales": ".weight",
        ".g_idx": ".weight",
    }

    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        allow(stored, "qweight", "qzeros", "scales", "g_idx")
        need(stored, "qweight", "qzeros", "scales")
        qweight, qzeros = (shape_of(stored, role, {"I32"}, 2) for role in ("qweight", "qzeros"))
        num_groups, num_outputs = scales = shape_of(stored, "scales", FLOATS, 2)
        _, num_inputs = self._scheme(qweight, qzeros, scales)
        if "g_idx" in stored:
            expect(stored, "g_idx", {"I32", "I64"}, (num_inputs,))
            groups = stored["g_idx"][...]
            if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
                raise Unfit(f"has a g_idx beyond its {num_groups} groups")
        return num_outputs, num_inputs

    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        scales, qweight, qzeros = tensors["scales"], tensors["qweight"], tensors["qzeros"]
        num_outputs = scales.shape[1]
        scheme, num_inputs = self._scheme(qweight.shape, qzeros.shape, scales.shape)
        numbers = unpacked(qweight[:, start:end].T, scheme.bits, num_inputs)
        zeros = self._zeros(qzeros, scheme.bits, num_outputs)[:, start:end]
        group_size = scheme.group_size or num_inputs
        groups = tensors["g_idx"].long() if "g_idx" in tensors else torch.arange(num_inputs) // group_size
        zeros_of_inputs = zeros.T.float()[:, groups]
        return numbers.float().sub_(zeros_of_inputs).mul_(scales[:, start:end].T.float()[:, groups])

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        return layout_of_groups(self._schemes[0].bits, self._schemes[0].group_size, num_inputs, has_zeros=True)

    def layout(self, stored: StoredTensors) -> Layout:
        qweight, qzeros, scales = (tuple(stored[role].get_shape()) for role in ("qweight", "qzeros", "scales"))
        scheme, num_inputs = self._scheme(qweight, qzeros, scales)
        dtype = stored["scales"].get_dtype()
        layout = layout_of_groups(scheme.bits, scheme.group_size, num_inputs, dtype, has_zeros=True)
        if "g_idx" in stored:
            input_order(stored["g_idx"][...], num_inputs // scales[0], scales[0])
        return layout

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if "g_idx" not in tensors:
            return None
        num_groups = len(tensors["scales"])
        return input_order(tensors["g_idx"], len(tensors["g_idx"]) // num_groups, num_groups)

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        bits, qweight, codes = layout.bits, tensors["qweight"], tensors["qweight"][:, start:end].T
        if bits != 4 or order is not None:
            codes = unpacked(codes, bits, len(qweight) * 32 // bits)
        qzeros = tensors["qzeros"][:, num_words(start, bits) : num_words(end, bits)]
        zeros = self._zeros(qzeros, bits, end - start).T - layout.middle
        codes = codes if order is None else codes[:, order]
        return numbers_of_blocks(codes, tensors["scales"][:, start:end].T, zeros, layout)

    def _zeros(self, qzeros: Tensor, bits: int, num_outputs: int) -> Tensor:
        """The zero points, int32 `[groups, out]`."""
        zeros = unpacked(qzeros, bits, num_outputs).int().add_(self._quantization.zero_offset)
        # The writer subtracted 1 with a wrap-around (0 became the largest number), so the sum wraps around, too.
        return zeros.bitwise_and_(2**bits - 1)

    def _scheme(self, qweight: tuple[int, ...], qzeros: tuple[int, ...], scales: tuple[int, ...]) -> tuple[Scheme, int]:
        """The scheme that the shapes fit, and the number of inputs. Raises Unfit."""
        for scheme in self._schemes:
            num_inputs, rest = divmod(qweight[0] * 32, scheme.bits)
            num_groups = -(-num_inputs // (scheme.group_size or num_inputs))
            zeros = (num_groups, num_words(qweight[1], scheme.bits))
            if not rest and scales == (num_groups, qweight[1]) and qzeros == zeros:
                return scheme, num_inputs
        raise Unfit(
            f"has parts of the shapes {list(qweight)}, {list(qzeros)} and {list(scales)}, which fit none of the bits "
            "and groups that config.json names"
        )
