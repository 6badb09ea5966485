"""Packed weights as a model's: each is expanded when it is read, some rows at a time, to the dtype that is served.

So a server holds its span expanded, one weight's packed parts, and some megabytes. Or it is laid out for kernels that
multiply by it as it is, where there are such for its format.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from corolla.chassis.errors import CheckpointError
from corolla.kernels.layouts import Layout
from corolla.kernels.repacking import Numbers, Panels, repack_numbers
from corolla.models.quantized.awq import Awq
from corolla.models.quantized.bitsandbytes import BitsAndBytes
from corolla.models.quantized.compressed_tensors import CompressedTensors
from corolla.models.quantized.description import Quantization
from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.format import Format
from corolla.models.quantized.fp8 import Fp8
from corolla.models.quantized.gptq import Gptq
from corolla.models.quantized.mxfp4 import Mxfp4
from corolla.models.quantized.parts import Parts, Stored, Unfit, grouped

NUMBERS_AT_ONCE: Final = 1 << 18
"""How many are expanded at once, to float32 first: they stay in a processor's caches."""
# Of activations and of keys and values, which stay as they are.
_UNUSED: Final = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip


FORMATS: Final[Mapping[str, Callable[[Quantization], Format]]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""By `Quantization.method`."""


class PackedWeight:
    """As a slice of safetensors: what is indexed is read and expanded, into memory of its own.

    Attributes:
        method: what transformers calls the format.
        shape: of the weight.
        dtype: that it is expanded to.
    """

    def __init__(self, method: str, unpack: Format, parts: Parts, dtype: torch.dtype, lock: threading.Lock) -> None:
        self.method = method
        self.shape = unpack.shape(parts)
        self._format = unpack
        self._parts = parts
        self.dtype = dtype
        self._lock = lock

    def layout(self) -> Layout:
        """See `Format`. Raises Unfit."""
        return self._format.layout(self._parts)

    def panels(self) -> Panels:
        """The weight as `layout` says. Raises Unfit."""
        layout = self.layout()
        parts = {role: stored[...] for role, stored in self._parts.items()}
        order = self._format.order(parts)

        def read(start: int, end: int) -> Numbers:
            return self._format.numbers(parts, start, end, layout, order)

        return Panels(repack_numbers(read, self.shape[0], self.shape[1], layout), order)

    def __getitem__(self, index: Any) -> Tensor:
        with self._lock:
            return self._expanded()[index]

    def _expanded(self) -> Tensor:
        parts = {role: stored[...] for role, stored in self._parts.items()}
        weight = torch.empty(self.shape, dtype=self.dtype)
        step = self._format.step
        at_once = max(1, NUMBERS_AT_ONCE // math.prod(self.shape[1:]) // step) * step
        for start in range(0, len(weight), at_once):
            end = min(start + at_once, len(weight))
            weight[start:end] = self._format.rows(parts, start, end)
        return weight


def packed_weights(
    quantization: Quantization, stored: Mapping[str, Stored], dtype: torch.dtype | None = None
) -> dict[str, Stored | PackedWeight]:
    """What a model has, of what is stored: parts become the weight that they are packed in, all else stays.

    Nothing is read but some bytes, and all is checked before any weight is.

    Args:
        quantization: what the checkpoint says.
        stored: safetensors' slices, by any names that end as the files' do.
        dtype: to expand to; None: float32.

    Raises:
        CheckpointError: a weight lacks a part, or its parts do not fit each other.
    """
    dtype = dtype or torch.float32
    unpack = FORMATS[quantization.method](quantization)
    # One at a time: transformers reads in several threads.
    lock = threading.Lock()
    found: dict[str, Stored | PackedWeight] = {}
    for name, roles in grouped((name for name in stored if not name.endswith(_UNUSED)), unpack.endings).items():
        parts = {role: stored[each] for role, each in roles.items()}
        is_packed = parts.keys() != {"weight"}
        if not is_packed and _is_lacking(name, parts["weight"].get_dtype()):
            raise _unfit(name, f"is stored as {parts['weight'].get_dtype()} without its scales")
        try:
            found[name] = (
                PackedWeight(quantization.method, unpack, parts, dtype, lock) if is_packed else parts["weight"]
            )
        except Unfit as error:
            raise _unfit(name, str(error)) from None
    return found


def likely_layouts(
    quantization: Quantization, names: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Layout | None]:
    """How packed weights would lie in memory if they stayed so, for which nothing is read; None: they are expanded.

    Args:
        names: of stored tensors, as the model has them.
        shapes: of linear layers' weights: others are expanded.
    """
    unpack = FORMATS[quantization.method](quantization)
    packed = {name: roles for name, roles in grouped(names, unpack.endings).items() if roles.keys() != {"weight"}}
    found: dict[str, Layout | None] = dict.fromkeys(packed)
    for name in packed.keys() & shapes.keys():
        with contextlib.suppress(Unfit):
            found[name] = unpack.likely_layout(packed[name], shapes[name][1])
    return found


def _is_lacking(name: str, dtype: str) -> bool:
    """Whether what is stored as it is lacks its scales: no model computes with weights of few bits."""
    return dtype not in FLOATS and (name.endswith("weight") or dtype.startswith("F"))


def _unfit(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"The weight {name} {reason}; fetch the checkpoint again.")
