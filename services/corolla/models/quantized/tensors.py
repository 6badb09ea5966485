"""Reads packed weights for a model: each is expanded when it is read, some rows at a time, to the served dtype.

So a server holds its expanded span, one weight's packed parts, and some megabytes. Weights of some formats can instead
be laid out as panels, by which kernels multiply without expanding them.
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
from corolla.models.quantized.bitsandbytes import BitsAndBytes
from corolla.models.quantized.compressed_tensors import CompressedTensors
from corolla.models.quantized.description import DESCRIPTION_FILES, Quantization
from corolla.models.quantized.floats import FLOATS, Fp8
from corolla.models.quantized.format import Format
from corolla.models.quantized.fp4 import Mxfp4, Nvfp4
from corolla.models.quantized.groups import Awq, Gptq
from corolla.models.quantized.stored_tensors import Stored, StoredTensors, Unfit, grouped

NUMBERS_AT_ONCE: Final = 1 << 18
"""How many numbers are expanded at once, first to float32; so many stay in a CPU's caches."""
# The endings of scales for activations, keys and values, which are not quantised here.
_UNUSED: Final = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip
# The parts of a weight of four bits that are nearly all of it.
_NUMBERS: Final = ("qweight", "weight_packed")

FORMATS: Final[Mapping[str, Callable[[Quantization], Format]]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
    "nvfp4": Nvfp4,
}
"""The formats by `Quantization.method`."""


class PackedWeight:
    """A packed weight. Indexing reads and expands it into new memory, as with safetensors' slices.

    Attributes:
        method: transformers' name of the format.
        shape: the shape of the expanded weight.
        dtype: the dtype of the expanded weight.
    """

    def __init__(
        self, method: str, unpack: Format, stored: StoredTensors, dtype: torch.dtype, lock: threading.Lock
    ) -> None:
        self.method = method
        self.shape = unpack.shape(stored)
        self._format = unpack
        self._stored = stored
        self.dtype = dtype
        self._lock = lock
        self._layout: Layout | None = None

    def layout(self) -> Layout:
        """See `Format.layout`. Raises Unfit."""
        if self._layout is None:
            self._layout = self._format.layout(self._stored)
        return self._layout

    def panels(self, device: torch.device | None = None) -> Panels:
        """The weight's panels in its `layout`, made and kept on the device; None: the CPU. Raises Unfit."""
        layout = self.layout()
        tensors = {role: stored[...] for role, stored in self._stored.items()}
        order = self._format.order(tensors)
        # The parts go up as the file has them, which are far fewer bytes than the numbers.
        tensors = {role: part.to(device) for role, part in tensors.items()}
        order = None if order is None else order.to(device)

        def read(start: int, end: int) -> Numbers:
            return self._format.numbers(tensors, start, end, layout, order)

        return Panels(repack_numbers(read, *self._format.matrix(self.shape), layout, device), order)

    @property
    def has_order(self) -> bool:
        """True if the panels have columns in another order than that of the inputs. Reads all but the numbers."""
        if not any(role.endswith("g_idx") for role in self._stored):
            return False
        parts = {role: stored[...] for role, stored in self._stored.items() if role not in _NUMBERS}
        return self._format.order(parts) is not None

    def __getitem__(self, index: Any) -> Tensor:
        """The numbers at `index`, in `dtype` on the CPU, in the same shape as indexing a tensor would give."""
        with self._lock:
            return self._expanded()[index]

    def _expanded(self) -> Tensor:
        tensors = {role: stored[...] for role, stored in self._stored.items()}
        weight = torch.empty(self.shape, dtype=self.dtype)
        step = self._format.step
        at_once = max(1, NUMBERS_AT_ONCE // math.prod(self.shape[1:]) // step) * step
        for start in range(0, len(weight), at_once):
            end = min(start + at_once, len(weight))
            weight[start:end] = self._format.rows(tensors, start, end)
        return weight


def packed_weights(
    quantization: Quantization, stored: Mapping[str, Stored], dtype: torch.dtype | None = None
) -> dict[str, Stored | PackedWeight]:
    """The weights of a model, by name: parts are combined into packed weights, and other tensors are passed on.

    All parts are checked before any weight is read; the check reads only a few bytes.

    Args:
        quantization: how the checkpoint's weights are packed.
        stored: maps names to safetensors' slices; the names must have the same endings as in the files.
        dtype: the dtype of expanded weights; None: float32.

    Raises:
        CheckpointError: a weight lacks a part, or its parts do not fit each other.
    """
    dtype = dtype or torch.float32
    unpack = FORMATS[quantization.method](quantization)
    # transformers reads in several threads, and the lock lets them expand one weight at a time.
    lock = threading.Lock()
    found: dict[str, Stored | PackedWeight] = {}
    for name, roles in grouped((name for name in stored if not name.endswith(_UNUSED)), unpack.endings).items():
        of_weight = {role: stored[each] for role, each in roles.items()}
        is_packed = of_weight.keys() != {"weight"}
        if not is_packed and _is_lacking(name, of_weight["weight"].get_dtype()):
            raise _unfit(name, f"is stored as {of_weight['weight'].get_dtype()} without its scales")
        try:
            found[name] = (
                PackedWeight(quantization.method, unpack, of_weight, dtype, lock) if is_packed else of_weight["weight"]
            )
        except Unfit as error:
            raise _unfit(name, str(error)) from None
    return found


def likely_layouts(
    quantization: Quantization, names: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Layout | None]:
    """Maps the names of packed weights to their layouts, without reading the weights; None: the weight is expanded.

    Args:
        quantization: how the checkpoint's weights are packed.
        names: the names of stored tensors, with the model's prefixes.
        shapes: the shapes of linear layers' weights; other weights are expanded.
    """
    unpack = FORMATS[quantization.method](quantization)
    packed = {name: roles for name, roles in grouped(names, unpack.endings).items() if roles.keys() != {"weight"}}
    found: dict[str, Layout | None] = dict.fromkeys(packed)
    for name in packed.keys() & shapes.keys():
        with contextlib.suppress(Unfit):
            found[name] = unpack.likely_layout(packed[name], shapes[name][1])
    return found


def weight_names(quantization: Quantization, names: Collection[str]) -> Collection[str]:
    """The names of the weights whose parts are stored under `names`."""
    return grouped(names, FORMATS[quantization.method](quantization).endings).keys()


def refuse_packed(stored: Mapping[str, Stored]) -> None:
    """Refuses packed numbers in a checkpoint that does not say how they are packed.

    Raises:
        CheckpointError: a tensor is not of a type of which the numbers are the weights themselves.
    """
    for name, tensor in stored.items():
        dtype = tensor.get_dtype()
        if dtype != "F64" and _is_lacking(name, dtype):
            raise CheckpointError(
                f"The weight {name} is stored as {dtype}, and neither config.json nor {', '.join(DESCRIPTION_FILES)} "
                "says how to read it; give the original checkpoint, or one that describes its quantisation."
            )


def _is_lacking(name: str, dtype: str) -> bool:
    """A weight or a float of no ordinary float dtype lacks its scales."""
    return dtype not in FLOATS and (name.endswith(("weight", "weight_packed")) or dtype.startswith("F"))


def _unfit(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"The weight {name} {reason}; give another revision, or the original checkpoint.")
