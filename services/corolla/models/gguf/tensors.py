"""The tensors of a GGUF file under transformers' names. Each is expanded when it is read, or stays packed.

transformers and the package `gguf` know the tensors' names, and how llama.cpp changed the tensors (it interleaves the
rows of some queries and keys, and adds one to some norms). llama.cpp defines the packed types in `ggml-common.h`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.gguf import dequant
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from corolla.chassis.errors import CheckpointError, InternalError, StartupError
from corolla.kernels.layouts import LAYOUTS, Layout
from corolla.kernels.repacking import Panels, repack
from corolla.models.gguf.header import TYPES, GgufHeader, GgufTensor, raw_bytes
from corolla.models.loading import LOADING
from corolla.models.packed.modules import packable_weights

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENDING: Final = re.compile(r"\.(weight|bias)$")


class GgufTensors(Mapping[str, "LazyTensor | Tensor"]):
    """All weights of a model, by transformers' names; a LazyTensor reads its weight from the file when it is indexed.

    A bias that the file lacks is zero, as in llama.cpp.

    Raises:
        StartupError: the package `gguf` is not installed.
        CheckpointError: the package does not know the architecture, or the model does not use a tensor of the file.
    """

    def __init__(self, header: GgufHeader, config: PretrainedConfig) -> None:
        self.header = header
        processor_class: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor = processor_class(config=config.to_dict())
        self._names, self._packable, self._zeros = _names(header.architecture, config, self._processor)
        self._stored: dict[str, list[str]] = defaultdict(list)
        for stored in header.tensors:
            # All experts of a layer are one stored tensor. `_names` has its name without the ending `.weight`.
            name = self._names.get(stored) or self._names.get(stored.removesuffix(".weight"))
            if name is None:
                raise CheckpointError(
                    f"The file holds the tensor {stored!r}, which its {config.model_type} model does not use here, so "
                    "answers could be others than llama.cpp's; give the model as safetensors."
                )
            self._stored[name].append(stored)
            self._zeros.pop(name, None)

    def __getitem__(self, name: str) -> "LazyTensor | Tensor":
        """The weight `name`; a bias that the file lacks is a float32 tensor `[out]` on the CPU."""
        zeros = self._zeros.get(name)
        return LazyTensor(self, self._stored[name]) if zeros is None else torch.zeros(zeros)

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
        return LAYOUTS.get(types.pop())

    def panels(self, name: str, shape: tuple[int, ...], device: torch.device | None = None) -> Panels:
        """The panels of a weight with a `layout`, as `repack` returns them.

        Args:
            name: transformers' name of the weight.
            shape: its shape in the model, `[out, in]` or `[experts, out, in]`.
            device: where the panels are made, and stay; None: the CPU.

        Raises:
            CheckpointError: the file cannot be read, or the stored shape differs.
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
        order = self._row_order(stored)

        def read(first: int, end: int) -> Tensor:
            if order is None:
                return _raw(tensors[0], first * row_bytes, (end - first) * row_bytes).view(end - first, row_bytes)
            return whole[order[first:end]]

        parts = [_raw(tensor, 0, tensor.num_bytes).view(-1, row_bytes) for tensor in tensors if order is not None]
        whole = torch.cat(parts) if len(parts) > 1 else next(iter(parts), torch.empty(0))
        del parts
        return Panels(repack(read, num_rows, shape[-1], LAYOUTS[tensors[0].type_name], device))

    def _row_order(self, names: Sequence[str]) -> Tensor | None:
        """The number in the file of each row of the model, int64 `[rows]`; None: both have the same order.

        The rows of several stored tensors are numbered one tensor after the other.
        """
        shapes = [self.header.tensors[name].shape[:-1] for name in names]
        numbers = np.arange(sum(map(math.prod, shapes)), dtype=np.float64)
        parts = np.split(numbers, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        numbered = {name: part.reshape(*shape, 1) for name, shape, part in zip(names, shapes, parts, strict=True)}
        found = self._processed(names, numbered.__getitem__).double().flatten()
        if not np.array_equal(np.sort(found.numpy()), numbers):
            raise InternalError(f"{names[0]!r} does not only change the order of its rows")
        return None if np.array_equal(found.numpy(), numbers) else found.long()

    def read(self, names: Sequence[str]) -> Tensor:
        """The tensor that the stored tensors `names` make up, float32 on the CPU, in the shape of the model's tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        return self._processed(names, lambda name: expanded(self.header.tensors[name]).numpy())

    def _processed(self, names: Sequence[str], numbers: Callable[[str], Any]) -> Tensor:
        """Makes what transformers makes of the stored tensors `names`, whose numbers stand in the arrays `numbers`."""
        parsed: dict[str, Any] = {"tensors": {}}
        for name in names:
            result = self._process(name, numbers(name), parsed)
            if result.name is not None and result.name in self._names:
                return torch.from_numpy(np.ascontiguousarray(result.weights))
        (whole,) = parsed["tensors"].values()
        return cast(Tensor, whole)

    def _process(self, name: str, weights: Any, parsed: dict[str, Any]) -> Any:
        try:
            return self._processor.process(
                weights=weights, name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
            )
        except ValueError:  # it takes rows apart by heads
            stored = self.header.tensors[name]
            raise CheckpointError(
                f"{stored.path} has {name!r} of the shape {list(stored.shape)}, which does not fit its settings; "
                "convert the model again."
            ) from None

    def has_rows(self, names: Sequence[str]) -> bool:
        """The names are one stored matrix whose rows are unchanged and in the model's order."""
        if len(names) != 1 or len(self.header.tensors[names[0]].shape) != 2:
            return False
        numbers = np.arange(self.header.tensors[names[0]].shape[0], dtype=np.float32)[:, None]
        result = self._process(names[0], numbers, {"tensors": {}})
        return result.name == names[0] and np.array_equal(result.weights, numbers)

    def read_rows(self, name: str, start: int, end: int) -> Tensor:
        """The rows `[start, end)` of a matrix with `has_rows`, float32 `[end - start, columns]` on the CPU.

        Raises as `read` does.
        """
        return expanded(self.header.tensors[name], start, end)


class LazyTensor:
    """A tensor with the interface of safetensors' slices: indexing reads the numbers into new memory, as float32."""

    def __init__(self, tensors: GgufTensors, names: Sequence[str]) -> None:
        self._tensors = tensors
        self._names = names
        self._has_rows = tensors.has_rows(names)

    def get_shape(self) -> tuple[int, ...]:
        """The shape of a matrix whose rows can be read separately; `()` for other tensors."""
        return self._tensors.header.tensors[self._names[0]].shape if self._has_rows else ()

    def __getitem__(self, index: Any) -> Tensor:
        """The numbers at `index`, float32 on the CPU, in the same shape as indexing a tensor would give."""
        if self._has_rows and isinstance(index, slice):
            start, end, _ = index.indices(self.get_shape()[0])
            return self._tensors.read_rows(self._names[0], start, end)
        return self._tensors.read(self._names)[index]


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
    from gguf import GGMLQuantizationType, dequantize

    block_bytes = TYPES[tensor.type_number][2]
    rows = raw.numpy().reshape(*shape[:-1], -1, block_bytes).reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType(tensor.type_number)))


def _raw(tensor: GgufTensor, start: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(raw_bytes(tensor, start, num_bytes)), dtype=torch.uint8)


def _names(
    architecture: str, config: PretrainedConfig, processor: Any
) -> tuple[dict[str, str], frozenset[str], dict[str, tuple[int, ...]]]:
    """A map from GGUF's names to transformers' names, the names of weights that can stay packed, and biases' shapes.

    The second and third results have transformers' names.
    """
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise StartupError("GGUF files need the package gguf; run `pip install gguf`.") from error
    known = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise CheckpointError("The package gguf does not know this architecture; install a newer one.")
    library: Any = AutoModelForCausalLM
    with LOADING, torch.device("meta"):
        empty = library.from_config(config)
    # `get_gguf_hf_weights_map` of transformers has the same result, but makes this table again for every module.
    table = get_tensor_name_map(known[architecture], config.num_hidden_layers)
    names: dict[str, str] = {}
    state = empty.state_dict()
    for own in map(processor.preprocess_name, state):
        match = _ENDING.search(own)
        ending = match[0] if match else ""
        stored = table.get_name(own.removesuffix(ending))
        if stored is None:
            processor.perform_fallback_tensor_mapping(names, ending, "", own)
        else:
            names[stored + ending] = own
    return (
        names,
        frozenset(packable_weights(empty)),
        {name: tuple(state[name].shape) for name in names.values() if name.endswith(".bias")},
    )
