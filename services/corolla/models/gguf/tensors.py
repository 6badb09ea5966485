"""A GGUF file's tensors under the names of transformers' model, expanded one by one as they are read.

Which tensor is which, and how llama.cpp changed it (it interleaves the rows of some queries and keys, and adds one to
some norms), transformers and the package `gguf` say.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.gguf import dequant
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from corolla.chassis.errors import CheckpointError, StartupError
from corolla.models.gguf.header import TYPES, GgufHeader, GgufTensor, raw_bytes
from corolla.models.loading import LOADING

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENDING: Final = re.compile(r"\.(weight|bias)$")


class GgufTensors(Mapping[str, "LazyTensor"]):
    """All weights of a model, by transformers' names; each is read from its file when it is indexed.

    Args:
        header: of the file.
        config: of the model.

    Raises:
        StartupError: the package `gguf` is not installed.
        CheckpointError: it does not know the architecture.
    """

    def __init__(self, header: GgufHeader, config: PretrainedConfig) -> None:
        self._header = header
        processor_class: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor = processor_class(config=config.to_dict())
        self._names = _names(header.architecture, config, self._processor)
        self._stored: dict[str, list[str]] = defaultdict(list)
        for stored in header.tensors:
            # Experts, which lie together, have no ending in the table.
            name = self._names.get(stored) or self._names.get(stored.removesuffix(".weight"))
            if name is not None:
                self._stored[name].append(stored)

    def __getitem__(self, name: str) -> "LazyTensor":
        return LazyTensor(self, self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def stored(self, name: str) -> Sequence[GgufTensor]:
        """Where the weights of this name lie: one tensor, or several that become one."""
        return [self._header.tensors[each] for each in self._stored[name]]

    def read(self, names: Sequence[str]) -> Tensor:
        """The tensor that the file keeps under `names`, in float32.

        Raises:
            CheckpointError: the file cannot be read.
        """
        parsed: dict[str, Any] = {"tensors": {}}
        for name in names:
            weights = expanded(self._header.tensors[name])
            result = self._processor.process(
                weights=weights.numpy(), name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
            )
            if result.name is not None and result.name in self._names:
                return torch.from_numpy(np.ascontiguousarray(result.weights))
        (whole,) = parsed["tensors"].values()
        return cast(Tensor, whole)


class LazyTensor:
    """As a slice of safetensors: what is indexed is read, into memory of its own."""

    def __init__(self, tensors: GgufTensors, names: Sequence[str]) -> None:
        self._tensors = tensors
        self._names = names

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensors.read(self._names)[index]


def expanded(tensor: GgufTensor) -> Tensor:
    """The numbers that a tensor of a file stands for, float32.

    Raises:
        CheckpointError: the file cannot be read.
    """
    raw = torch.frombuffer(bytearray(raw_bytes(tensor, 0, tensor.num_bytes)), dtype=torch.uint8)
    if (dtype := _PLAIN.get(tensor.type_name)) is not None:
        return raw.view(dtype).reshape(tensor.shape).float()
    if tensor.type_number in dequant.GGML_BLOCK:
        expand: Any = dequant.dequantize  # untyped in transformers
        return torch.as_tensor(expand(raw, tensor.type_number)).reshape(tensor.shape)
    from gguf import GGMLQuantizationType, dequantize

    block_bytes = TYPES[tensor.type_number][2]
    rows = raw.numpy().reshape(*tensor.shape[:-1], -1, block_bytes).reshape(*tensor.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType(tensor.type_number)))


def _names(architecture: str, config: PretrainedConfig, processor: Any) -> dict[str, str]:
    """GGUF's name of each tensor to transformers'."""
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise StartupError("GGUF files need the package gguf; run `pip install 'corolla[gguf]'`.") from error
    known = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise CheckpointError("The package gguf does not know this architecture; install a newer one.")
    library: Any = AutoModelForCausalLM
    with LOADING, torch.device("meta"):
        empty = library.from_config(config)
    # `get_gguf_hf_weights_map` of transformers gives the same, and makes this table anew for every module.
    table = get_tensor_name_map(known[architecture], config.num_hidden_layers)
    names: dict[str, str] = {}
    for own in map(processor.preprocess_name, empty.state_dict()):
        match = _ENDING.search(own)
        ending = match[0] if match else ""
        stored = table.get_name(own.removesuffix(ending))
        if stored is None:
            processor.perform_fallback_tensor_mapping(names, ending, "", own)
        else:
            names[stored + ending] = own
    return names
