"""The engine `vllm`: blocks of a span by vLLM's layers and kernels, over the server's own pages."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from corolla.block_server.engines.vllm_layers import VllmLayers, build_layers
from corolla.chassis.errors import CheckpointError
from corolla.models.adapters.products import AdapterBatch, Place
from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import keep_layers_of_config
from corolla.models.families import Family, attention_windows
from corolla.models.fused import Attend
from corolla.models.pieces import open_tensors
from corolla.models.span_model import LinearPlace, prefix_of, span_tensors
from corolla.wire.span import Span

_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's linear layers that compute several of most families."""


class VllmEngine:
    """Blocks of a span; see `SpanEngine`.

    Args:
        config: the model's, cut to the span.
        layers: of the span.
        stored: for each block, paths of what has weights in the checkpoint.
    """

    packs_rows = True
    keeps_threads = True

    def __init__(
        self,
        config: PretrainedConfig,
        family: Family,
        layers: VllmLayers,
        stored: Sequence[frozenset[str]],
        span: Span,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.family = family
        self.span = span
        self.dtype = dtype
        self.device = device
        self.adapters: AdapterBatch | None = None
        self._layers = layers
        self._windows = attention_windows(config)
        self._places = tuple(map(_places_of, layers.linears, stored))
        self._takes_adapters = False

    @classmethod
    def load(cls, checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: torch.device) -> "VllmEngine":
        """Reads a span's tensors, and only those.

        Raises:
            CheckpointError: they cannot be had.
            StartupError: vLLM cannot run them.
        """
        if span.end > checkpoint.num_blocks:
            raise CheckpointError(f"{checkpoint.name} has {checkpoint.num_blocks} blocks, so it has no span {span}")
        return cls._of(checkpoint, span, dtype, device, _weights(checkpoint, span, dtype))

    @classmethod
    def make(cls, checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: torch.device) -> "VllmEngine":
        """The same with made-up weights: it reads nothing, and computes as long. Raises StartupError."""
        return cls._of(checkpoint, span, dtype, device, None)

    @classmethod
    def _of(
        cls,
        checkpoint: Checkpoint,
        span: Span,
        dtype: torch.dtype,
        device: torch.device,
        weights: Iterator[tuple[str, Tensor]] | None,
    ) -> "VllmEngine":
        layers = build_layers(
            checkpoint.folder, checkpoint.family.model_type, span, dtype=dtype, device=device,
            context_length=checkpoint.context_length, weights=weights,
        )  # fmt: skip
        config = copy.deepcopy(checkpoint.config)
        keep_layers_of_config(config, range(span.start, span.end))
        return cls(config, checkpoint.family, layers, _stored(checkpoint, span), span, dtype, device)

    @property
    def fused(self) -> "VllmEngine":
        return self

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def nbytes(self) -> int:
        return self._layers.nbytes

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """For each block, whether it is a mixture."""
        return self._layers.has_experts

    def modules(self) -> Iterator[nn.Module]:
        return (module for layer in self._layers.layers for module in layer.modules())

    def layer_indices(self, blocks: Span) -> range:
        """See `SpanEngine`. Raises ValueError: the span does not hold them all."""
        return self.span.indices(blocks)

    def make_fused(self, tuning_budget_s: float = 2.0) -> None:
        """Nothing is to be chosen: vLLM did, when the layers were built."""

    def set_attention(self, implementation: str) -> None:
        """Nothing is to be named: attention is the batch's."""

    @torch.inference_mode()
    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        end: int,
        layers: range,
        attend: Attend,
        adapters: AdapterBatch | None = None,
    ) -> Tensor:
        """See `PackedLayers`."""
        facts = self._layers.facts

        def attended(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own, window = facts[index], self._windows[index]
            return attend(index, query, key, value, scaling=own.scaling, window=window, softcap=own.softcap)

        self.adapters = adapters
        try:
            return self._layers.run(hidden, position_ids, layers, attended)
        finally:
            self.adapters = None

    def linear_place(self, layer: int, path: str) -> LinearPlace | None:
        """See `SpanModel.linear_place`."""
        for place, module in self._places[layer].items():
            if path in place:
                number = place.index(path)
                sizes = [int(module.output_size)] if len(place) == 1 else [int(each) for each in module.output_sizes]
                return LinearPlace(place, sum(sizes[:number]), (int(module.input_size), sizes[number]))
        return None

    def take_adapters(self) -> None:
        """Lets `adapters` change what linear layers give. Not while blocks run."""
        if self._takes_adapters:
            return
        self._takes_adapters = True
        for index, places in enumerate(self._places):
            for place, module in places.items():
                module.register_forward_hook(self._adding(index, place))

    def _adding(self, layer: int, place: Place) -> Any:
        def add(_module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
            if self.adapters is not None:
                self.adapters.add(layer, place, inputs[0], output[0])

        return add


def _places_of(linears: Mapping[str, Any], stored: frozenset[str]) -> dict[Place, Any]:
    """Of a block's linear layers, those that are one or several of the checkpoint's."""
    places: dict[Place, Any] = {}
    for path, module in linears.items():
        parent, _, name = path.rpartition(".")
        place = (path,) if path in stored else tuple(f"{parent}.{part}" for part in _PARTS.get(name, ()))
        if place and stored.issuperset(place):
            places[place] = module
    return places


def _stored(checkpoint: Checkpoint, span: Span) -> list[frozenset[str]]:
    parts = [name.split(".", 2)[1:] for name in span_tensors(checkpoint, prefix_of(checkpoint), span)]
    return [
        frozenset(part.rpartition(".")[0] for number, part in parts if int(number) == index)
        for index in range(len(span))
    ]


def _weights(checkpoint: Checkpoint, span: Span, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The span's tensors under the names that they have in the whole model: plain, or packed as they are published."""
    names: dict[str, str] = {}
    for name, stored in span_tensors(checkpoint, prefix_of(checkpoint), span).items():
        layers, number, part = name.split(".", 2)
        names[f"model.{layers}.{int(number) + span.start}.{part}"] = stored
    checkpoint.fetch(names.values())
    if checkpoint.quantization is None:
        with checkpoint.open_tensors(names, dtype) as plain:
            for name, tensor in plain.items():
                yield name, tensor[:].to(dtype)
        return
    with open_tensors(checkpoint.weight_index, names) as packed:
        for name, tensor in packed.items():
            yield name, tensor[:]
