"""The tensors of a GGUF file under transformers' names. Each is expanded when it is read, or stays packed.

The table of architectures has the tensors' names, and says how llama.cpp changed the tensors. llama.cpp defines the
packed types in `ggml-common.h`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.gguf import dequant

from corolla.chassis.errors import CheckpointError, InternalError, StartupError
from corolla.kernels.layouts import LAYOUTS, Layout, Scale
from corolla.kernels.repacking import Panels, repack
from corolla.models.empty_model import model_class_of, without_weights
from corolla.models.families import FAMILIES
from corolla.models.gguf.architectures import NAMES, Transform
from corolla.models.gguf.description import FACTORS, blocks_of, row_of
from corolla.models.gguf.header import TYPES, GgufHeader, GgufTensor, raw_bytes
from corolla.models.gguf.transforms import ORDERS, TRANSFORMS, fitted, joined
from corolla.models.packed.modules import packable_weights
from corolla.models.quantized.floats import scale_numbers, with_scales
from corolla.models.quantized.fp4 import mxfp4_layout
from corolla.models.quantized.stored_tensors import Unfit

_LAYOUTS: Final[Mapping[str, Layout]] = {**LAYOUTS, "MXFP4": mxfp4_layout(32)}
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENDING: Final = re.compile(r"\.(weight|bias)$")
_BLOCK: Final = re.compile(r"blk\.(?P<block>\d{1,6})\.(?P<name>.+)")


class GgufTensors(Mapping[str, "LazyTensor | Tensor"]):
    """All weights of a model, by transformers' names; a LazyTensor reads its weight from the file when it is indexed.

    A bias that the file lacks is zero, as in llama.cpp. Blocks that only predict further tokens are left out.

    Raises:
        CheckpointError: the architecture is not served, the family's code cannot build the model, or the model does not
            use a tensor of the file.
    """

    def __init__(self, header: GgufHeader, config: PretrainedConfig) -> None:
        self.header = header
        self._config = config
        empty: Any = without_weights(model_class_of(AutoModelForCausalLM, config), config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
        self._packable = frozenset(packable_weights(empty))
        names = _Names(header, empty.base_model_prefix, self._shapes)
        found: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._transforms: dict[str, Transform | None] = {}
        for stored in header.tensors:
            if names.is_left_out(stored):
                continue
            place = names.place(stored)
            if place is None:
                raise CheckpointError(
                    f"The file holds the tensor {stored!r}, which its {config.model_type} model does not use here, so "
                    "answers could be others than llama.cpp's; give the model as safetensors."
                )
            name, order, transform = place
            found[name].append((order, stored))
            self._transforms[name] = transform
        self._stored = {name: [stored for _, stored in sorted(each)] for name, each in found.items()}
        self._zeros = {
            name: shape for name, shape in self._shapes.items() if name.endswith(".bias") and name not in found
        }

    def __getitem__(self, name: str) -> "LazyTensor | Tensor":
        """The weight `name`; a bias that the file lacks is a float32 tensor `[out]` on the CPU."""
        zeros = self._zeros.get(name)
        return LazyTensor(self, name) if zeros is None else torch.zeros(zeros, dtype=torch.float32)

    def __iter__(self) -> Iterator[str]:
        yield from self._stored
        yield from self._zeros

    def __len__(self) -> int:
        return len(self._stored) + len(self._zeros)

    def stored(self, name: str) -> Sequence[GgufTensor]:
        """The stored tensors that make up the weight `name`: one or several, or none for a bias that is zero."""
        return [self.header.tensors[each] for each in self._stored.get(name, ())]

    def layout(self, name: str) -> Layout | None:
        """The layout in memory of a weight that stays packed.

        None: the weight must be expanded, since its type has no kernel, or it is neither the matrix of a linear layer
        or an embedding, nor experts whose gate and up have one type.
        """
        tensors = self.stored(name)
        types = {tensor.type_name for tensor in tensors}
        is_matrix = len(tensors) == 1 and len(tensors[0].shape) == 2
        are_experts = all(len(tensor.shape) == 3 for tensor in tensors)
        if name not in self._packable or len(types) != 1 or not (is_matrix or are_experts):
            return None
        if self._transforms[name] not in ORDERS:
            return None
        return _LAYOUTS.get(types.pop())

    def panels(self, name: str, shape: tuple[int, ...], device: torch.device | None = None) -> Panels:
        """The panels of a weight with a `layout`, as `repack` returns them.

        Args:
            name: transformers' name of the weight.
            shape: its shape in the model, `[out, in]` or `[experts, out, in]`.
            device: where the panels are made, and stay; None: the CPU.

        Raises:
            CheckpointError: the file cannot be read, the stored shape differs, or no kernel can multiply by a scale.
        """
        stored = self._stored[name]
        tensors = self.stored(name)
        for each, tensor in zip(stored, tensors, strict=True):
            # The rows of experts may be in several tensors.
            own = (*shape[:-2], shape[-2] // len(tensors), shape[-1])
            if tensor.shape != own:
                raise CheckpointError(
                    f"{tensor.path} has {each!r} of the shape {list(tensor.shape)} where its model has {list(own)}; "
                    "convert the model again, or give it as safetensors."
                )
        num_rows = math.prod(shape[:-1])
        row_bytes = sum(tensor.num_bytes for tensor in tensors) // num_rows
        order = self._row_order(name)

        def read(first: int, end: int) -> Tensor:
            if order is None:
                return _raw(tensors[0], first * row_bytes, (end - first) * row_bytes).view(end - first, row_bytes)
            return whole[order[first:end]]

        parts = [_raw(tensor, 0, tensor.num_bytes).view(-1, row_bytes) for tensor in tensors if order is not None]
        whole = torch.cat(parts) if len(parts) > 1 else next(iter(parts), torch.empty(0))
        del parts
        layout = _LAYOUTS[tensors[0].type_name]
        panels = repack(read, num_rows, shape[-1], layout, device, tensors[0].type_name)
        if layout.scale is Scale.E8M0:
            try:
                with_scales(layout, scale_numbers(panels[..., : layout.minima_at].amax()))
            except Unfit as unfit:
                raise CheckpointError(
                    f"{tensors[0].path} has {stored[0]!r}, which {unfit}; set COROLLA_QUANTIZATION to none."
                ) from unfit
        return Panels(panels)

    def _row_order(self, name: str) -> Tensor | None:
        """The number in the file of each row of the weight `name`, int64 `[rows]`; None: both have the same order.

        The rows of several stored tensors are numbered one tensor after the other.
        """
        first, numbered = 0, []
        for tensor in self.stored(name):
            rows = tensor.shape[:-1]
            numbered.append(torch.arange(first, first + math.prod(rows)).reshape(*rows, 1))
            first += math.prod(rows)
        found = self._made(name, numbered).flatten()
        if not torch.equal(found.sort().values, torch.arange(first)):
            raise InternalError(f"{name!r} does not only change the order of its rows")
        return None if torch.equal(found, torch.arange(first)) else found

    def read(self, name: str) -> Tensor:
        """The weight `name`, float32 on the CPU, in the shape of the model's tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return fitted(self._made(name, [expanded(tensor) for tensor in self.stored(name)]), self._shapes[name])

    def _made(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        transform = self._transforms[name]
        try:
            return joined(parts) if transform is None else TRANSFORMS[transform](parts, self._config)
        except (RuntimeError, ValueError, IndexError):  # shapes that do not fit each other
            tensor = self.stored(name)[0]
            raise CheckpointError(
                f"{tensor.path} has {self._stored[name][0]!r} of the shape {list(tensor.shape)}, which does not fit "
                "its settings; convert the model again."
            ) from None

    def has_rows(self, name: str) -> bool:
        """The weight `name` is one stored matrix whose rows are unchanged and in the model's order."""
        return (
            self._transforms[name] is None
            and len(tensors := self.stored(name)) == 1
            and len(tensors[0].shape) == 2
            and tensors[0].shape == self._shapes[name]
        )


class LazyTensor:
    """A tensor with the interface of safetensors' slices: indexing reads the numbers into new memory, as float32."""

    def __init__(self, tensors: GgufTensors, name: str) -> None:
        self._tensors = tensors
        self._name = name
        self._has_rows = tensors.has_rows(name)

    def get_shape(self) -> tuple[int, ...]:
        """The shape of a matrix whose rows can be read separately; `()` for other tensors."""
        return self._tensors.stored(self._name)[0].shape if self._has_rows else ()

    def __getitem__(self, index: Any) -> Tensor:
        """The numbers at `index`, float32 on the CPU, in the same shape as indexing a tensor would give."""
        if self._has_rows and isinstance(index, slice):
            start, end, _ = index.indices(self.get_shape()[0])
            return expanded(self._tensors.stored(self._name)[0], start, end)
        return self._tensors.read(self._name)[index]


def expanded(tensor: GgufTensor, start: int = 0, end: int | None = None) -> Tensor:
    """The numbers of a tensor, or of its entries `[start, end)`, expanded to float32 `[end - start, ...]` on the CPU.

    Raises:
        CheckpointError: the file cannot be read.
    """
    shape = (min(tensor.shape[0], tensor.shape[0] if end is None else end) - start, *tensor.shape[1:])
    entry_bytes = tensor.num_bytes // tensor.shape[0]
    raw = _raw(tensor, start * entry_bytes, shape[0] * entry_bytes)
    if (dtype := _PLAIN.get(tensor.type_name)) is not None:
        return raw.view(dtype).reshape(shape).float()
    if tensor.type_number in dequant.GGML_BLOCK:
        expand: Any = dequant.dequantize  # untyped in transformers
        return torch.as_tensor(expand(raw, tensor.type_number)).reshape(shape)
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        raise StartupError("GGUF files of this type need the package gguf; run `pip install gguf`.") from error
    block_bytes = TYPES[tensor.type_number][2]
    rows = raw.numpy().reshape(*shape[:-1], -1, block_bytes).reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType(tensor.type_number)))


def _raw(tensor: GgufTensor, start: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(raw_bytes(tensor, start, num_bytes)), dtype=torch.uint8)


class _Names:
    """Where the tensors of a file stand in its model.

    Args:
        prefix: the name of the base model in the model.
        shapes: the shapes of the model's tensors, by their names.
    """

    def __init__(self, header: GgufHeader, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._row = row_of(header)
        self._left_out = range(*blocks_of(header))
        self._shapes = shapes
        family = FAMILIES[self._row.model_type]
        self._prefix = f"{prefix}."
        self._layers = family.layers
        self._in_blocks = {**NAMES, **self._row.names}
        self._order = {name: index for index, name in enumerate(self._in_blocks)}
        self._outside = {
            "token_embd": self._prefix + family.embedding,
            "output_norm": self._prefix + family.norm,
            # Some converters name the final norm as if it followed the embedding.
            "token_embd_norm": self._prefix + (family.bypassed or (family.norm,))[0],
            "output": "lm_head",
        }

    def is_left_out(self, stored: str) -> bool:
        """The model needs no such weight: it belongs to its configuration, or predicts further tokens."""
        match = _BLOCK.fullmatch(stored)
        return stored in FACTORS if match is None else int(match["block"]) in self._left_out

    def place(self, stored: str) -> tuple[str, int, Transform | None] | None:
        """The name in the model of a stored tensor, its number among those that make it up, and what makes it.

        None: the model has no such tensor.
        """
        match = _BLOCK.fullmatch(stored)
        name = stored if match is None else match["name"]
        ending = _ENDING.search(name)
        base = name if ending is None else name.removesuffix(ending[0])
        if match is None:
            path, key = self._outside.get(base), self._outside.get(base, "")
            full = path
        else:
            key = self._in_blocks.get(name) or self._in_blocks.get(base) or ""
            full = f"{self._prefix}{self._layers}.{int(match['block'])}.{key}" if key else None
        if full is None:
            return None
        with_ending = full + (ending[0] if ending else "")
        found = with_ending if with_ending in self._shapes else full
        order = self._order.get(name, self._order.get(base, 0))
        return None if found not in self._shapes else (found, order, self._row.transforms.get(key))
