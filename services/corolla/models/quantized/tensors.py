"""Packed weights as a model's: each is expanded when it is read, some rows at a time, to the dtype that is served.

So a server holds its span expanded, one weight's packed parts, and some megabytes.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from corolla.chassis.errors import CheckpointError
from corolla.models.quantized.awq import Awq
from corolla.models.quantized.bitsandbytes import BitsAndBytes
from corolla.models.quantized.compressed_tensors import CompressedTensors
from corolla.models.quantized.description import Quantization
from corolla.models.quantized.floats import FLOATS
from corolla.models.quantized.fp8 import Fp8
from corolla.models.quantized.gptq import Gptq
from corolla.models.quantized.mxfp4 import Mxfp4
from corolla.models.quantized.parts import Parts, Stored, Unfit, grouped

log = logging.getLogger(__name__)

NUMBERS_AT_ONCE: Final = 1 << 18
"""How many are expanded at once, to float32 first: they stay in a processor's caches."""
# Of activations and of keys and values, which stay as they are.
_UNUSED: Final = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip


class Format(Protocol):
    """One way to pack weights."""

    @property
    def endings(self) -> Mapping[str, str]:
        """Endings of the names of a weight's parts, and what stands for each in the weight's own name."""
        ...

    @property
    def step(self) -> int:
        """Rows are expanded from and up to multiples of it, the last one apart."""
        ...

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The shape of the weight that the parts hold.

        Nothing is read but what a part of some bytes says of the others.

        Raises:
            Unfit: they hold none.
        """
        ...

    def rows(self, parts: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The weight's entries `[start, end)` of its first dimension, float32, in memory of their own.

        The parts are those that `shape` found right.
        """
        ...


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
        shape: of the weight.
    """

    def __init__(self, unpack: Format, parts: Parts, dtype: torch.dtype, lock: threading.Lock) -> None:
        self.shape = unpack.shape(parts)
        self._format = unpack
        self._parts = parts
        self._dtype = dtype
        self._lock = lock

    def __getitem__(self, index: Any) -> Tensor:
        with self._lock:
            return self._expanded()[index]

    def _expanded(self) -> Tensor:
        parts = {role: stored[...] for role, stored in self._parts.items()}
        weight = torch.empty(self.shape, dtype=self._dtype)
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
    num_packed = 0
    for name, roles in grouped((name for name in stored if not name.endswith(_UNUSED)), unpack.endings).items():
        parts = {role: stored[each] for role, each in roles.items()}
        is_packed = parts.keys() != {"weight"}
        if not is_packed and _is_lacking(name, parts["weight"].get_dtype()):
            raise _unfit(name, f"is stored as {parts['weight'].get_dtype()} without its scales")
        try:
            found[name] = PackedWeight(unpack, parts, dtype, lock) if is_packed else parts["weight"]
        except Unfit as error:
            raise _unfit(name, str(error)) from None
        num_packed += is_packed
    if num_packed:
        facts = {"method": quantization.method, "dtype": str(dtype).removeprefix("torch."), "weights": num_packed}
        log.info("weights are expanded as they are read", extra=facts)
    return found


def _is_lacking(name: str, dtype: str) -> bool:
    """Whether what is stored as it is lacks its scales: no model computes with weights of few bits."""
    return dtype not in FLOATS and (name.endswith("weight") or dtype.startswith("F"))


def _unfit(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"The weight {name} {reason}; fetch the checkpoint again.")
