"""A span of blocks as a torch module: the family's own base model, cut down to some of its layers."""

import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import CheckpointError, InternalError
from corolla.kernels.layouts import Layout
from corolla.models.adapters.products import AdapterBatch, Place
from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import (
    build_cut,
    cut_class,
    keep_layers,
    keep_layers_of_config,
    make_up,
    model_class_of,
    without_weights,
)
from corolla.models.families import Family, packs_rows, short_factor_length
from corolla.models.fused import PLACES, FusedSpan, fits
from corolla.models.linear import TunedLinear, replace_linears, tune
from corolla.models.long_rope import LongRope
from corolla.models.packed.choice import layouts_of, types_of
from corolla.models.packed.modules import make_up_packed, replace_packed
from corolla.models.quantization import quantize, stored_bytes
from corolla.wire.span import Span

# Reads the cached latents of all tokens at every step, with whatever adapter they were computed.
_EXPANSION: Final = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """Where a linear layer's product with an adapter is added.

    Attributes:
        place: its layer's, or that of several layers that are computed together.
        first_column: where its output begins in that of the place.
        shape: numbers that it reads and gives.
    """

    place: Place
    first_column: int
    shape: tuple[int, int]


class SpanModel:
    """Blocks `[span.start, span.end)` of a model, without embedding, final norm and head.

    The layers number themselves from 0 at `span.start`; that number is the layer's index in any cache. A run of only
    some of the blocks goes through a view that shares the layers and keeps their numbers.

    Attributes:
        span: the blocks held.
        config: the model's configuration, cut to the span.
        family: the row of the table of families.
        packs_rows: whether rows of different sessions may be packed into one call.
        dtype: of the weights, as of hidden states.
        device: where they are.
        fused: a faster way to run the same blocks, once `make_fused` found one.
        adapters: of the batch that `forward` is about to run; None where no row has one.
        long_rope: what has to know which tokens of a batch belong to long texts; None where that makes no difference.
    """

    def __init__(self, base: PreTrainedModel, span: Span, family: Family) -> None:
        self.span = span
        self.family = family
        self.packs_rows = packs_rows(family, base.config)
        self.dtype: torch.dtype = base.dtype
        self.device: torch.device = base.device
        self.fused: FusedSpan | None = None
        self.adapters: AdapterBatch | None = None
        self.long_rope = _separate_factors(base, family)
        self._takes_adapters = False
        self._base = base
        self._views: dict[Span, PreTrainedModel] = {span: base}

    @property
    def config(self) -> PretrainedConfig:
        return self._base.config

    @functools.cached_property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and buffers."""
        tensors = (*self._base.parameters(), *self._base.buffers())
        return sum(stored_bytes(tensor) for tensor in tensors)

    def modules(self) -> Iterator[nn.Module]:
        """All that the blocks are made of, as `nn.Module.modules` gives it."""
        return self._base.modules()

    def make_fused(self, tuning_budget_s: float = 2.0) -> None:
        """Prepares the fastest way to run the blocks on this machine, for good; a fused way is the only one then.

        Args:
            tuning_budget_s: how long multiplication may be measured.
        """
        layers = list(cast(nn.ModuleList, self._base.get_submodule(self.family.layers)))
        if self.family.is_fused and self.packs_rows and all(map(fits, layers)):
            self.fused = FusedSpan.of(layers, self._base.get_submodule("rotary_emb"), self.config)
        kept = self.family.read_weights
        tune(replace_linears(self._base, kept) if self.fused is None else self.fused.linears, budget_s=tuning_budget_s)

    def linear_place(self, layer: int, path: str) -> LinearPlace | None:
        """Where the output of a linear layer is; None: the layer has none of this path that sees each token once.

        Args:
            path: within the block, such as `self_attn.q_proj`.
        """
        if (self.family.caches_latents and path == _EXPANSION) or path.endswith(self.family.read_weights):
            return None
        modules = dict(self._layer(layer).named_modules())
        if (shape := _features(modules.get(path))) is None:
            return None
        if self.fused is None:
            return LinearPlace((path,), 0, shape)
        place = next((each for each in PLACES if path in each), None)
        if place is None:
            return None
        widths = [_features(modules[each]) or (0, 0) for each in place[: place.index(path)]]
        return LinearPlace(place, sum(width for _, width in widths), shape)

    def take_adapters(self) -> None:
        """Lets `adapters` change what linear layers give. Not while blocks run; fused ones need no preparation."""
        if self._takes_adapters or self.fused is not None:
            return
        self._takes_adapters = True
        for index in range(len(self.span)):
            for path, module in self._layer(index).named_modules():
                if self.linear_place(index, path) is not None:
                    module.register_forward_hook(self._adding(index, (path,)))

    def _adding(self, layer: int, place: Place) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def add(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if self.adapters is None:
                return
            rows: Tensor = inputs[0]
            num_tokens = rows.numel() // rows.shape[-1]
            if num_tokens != self.adapters.num_tokens:
                raise InternalError("an adapter changes a layer that sees some of the tokens only")
            self.adapters.add(layer, place, rows.reshape(num_tokens, -1), output.view(num_tokens, -1))

        return add

    def _layer(self, index: int) -> nn.Module:
        return cast(nn.ModuleList, self._base.get_submodule(self.family.layers))[index]

    def set_attention(self, implementation: str) -> None:
        """Names the attention function, a key of the library's AttentionInterface, that all layers use from now on."""
        for view in self._views.values():
            view.config._attn_implementation = implementation

    @torch.inference_mode()
    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor | None = None,
        *,
        blocks: Span | None = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **attention_kwargs: Any,
    ) -> Tensor:
        """Runs the blocks.

        Args:
            hidden: `[B, T, H]`, the output of the block before `blocks`, in the model's dtype.
            position_ids: int64 `[B, T]`, absolute positions. None counts on from what the cache holds.
            blocks: a run within the span; None runs the whole span.
            past_key_values: a transformers cache, or None for attention functions that keep their own.
            attention_mask: as the family's base model takes it.
            attention_kwargs: handed through to the attention function.

        Returns:
            `[B, T, H]`, the output of the last of `blocks`, before any final norm.
        """
        output = self._view(blocks or self.span)(
            inputs_embeds=hidden,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=past_key_values is not None,
            **{self.family.cache_argument: past_key_values},
            **attention_kwargs,
        )
        return cast(Tensor, output.last_hidden_state)

    __call__ = forward

    def _view(self, blocks: Span) -> PreTrainedModel:
        view = self._views.get(blocks)
        if view is None:
            view = self._views[blocks] = self._cut_view(self.span.indices(blocks))
        return view

    def _cut_view(self, indices: range) -> PreTrainedModel:
        config = copy.deepcopy(self._base.config)
        keep_layers_of_config(config, indices)
        layers = cast(nn.ModuleList, self._base.get_submodule(self.family.layers))
        kept = nn.ModuleList(layers[index] for index in indices)
        return cast(PreTrainedModel, _with_layers(self._base, self.family.layers.split("."), kept, config))


def _with_layers(module: Any, path: Sequence[str], layers: nn.ModuleList, config: PretrainedConfig) -> Any:
    """A model that shares everything with `module` but the layers at `path` and what is around them."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    view.config = config
    name, *inner = path
    view._modules[name] = _with_layers(view._modules[name], inner, layers, config) if inner else layers
    return view


def _separate_factors(base: PreTrainedModel, family: Family) -> LongRope | None:
    """Has a longrope embedding choose each row's factors by the row's own text."""
    short_length = short_factor_length(base.config)
    if short_length is None or not family.begins_anew:
        return None
    long_rope = LongRope(base.get_submodule("rotary_emb"), short_length)
    base.set_submodule("rotary_emb", long_rope)
    return long_rope


def _features(module: nn.Module | None) -> tuple[int, int] | None:
    """Numbers that a linear layer of whatever class reads and gives; None: it is none."""
    if isinstance(module, TunedLinear):
        return module.weight.shape[1], module.weight.shape[0]
    if isinstance(module, nn.Embedding) or module is None:
        return None
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return sizes if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None  # type: ignore[return-value]


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
    quantization: str = "none",
) -> SpanModel:
    """Reads a span's tensors, and only those, into a model.

    Args:
        checkpoint: where the weights lie.
        span: the blocks to hold.
        dtype: of the weights in memory, whatever the files hold.
        device: where they go.
        attention: transformers' attention implementation; families that `sdpa` does not serve get `eager`.
        quantization: of the weights of linear layers: `none`; `int8` or `int4`, once they are read; `packed`, as the
            files have them.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or cannot be read.
        StartupError: the weights cannot be quantised so.
    """
    device = torch.device(device)
    if span.end > checkpoint.num_blocks:
        raise CheckpointError(
            f"{checkpoint.name} has {checkpoint.num_blocks} blocks, so it has no span {span}; ask for blocks within "
            f"0:{checkpoint.num_blocks}."
        )
    config = copy.deepcopy(checkpoint.config)
    base = build_cut(
        checkpoint,
        model_class_of(AutoModel, config),
        config,
        functools.partial(_cut_to_span, family=checkpoint.family, span=span),
        span_tensors(checkpoint, span),
        dtype=dtype,
        device=device,
        quantization=quantization,
        attention=attention,
    )
    return _finished(base, span, checkpoint.family, quantization)


def make_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str = "none",
) -> SpanModel:
    """A span like that of `load_span`, with made-up weights: it reads nothing, and computes as long.

    Raises:
        StartupError: the weights cannot be quantised so.
    """
    device = torch.device(device)
    names = span_tensors(checkpoint, span)
    layouts = layouts_of(checkpoint, names, quantization, device, functools.partial(_empty_span, checkpoint, span))
    config, cut = _cut_class_of(checkpoint, span, layouts, dtype)
    base = make_up(cut, config, dtype=dtype, attention="sdpa")
    make_up_packed(base)
    return _finished(cast(Any, base).to(device), span, checkpoint.family, quantization)


def fetch_span(checkpoint: Checkpoint, span: Span) -> None:
    """Fetches what `load_span` would read, where that is not here yet.

    Raises:
        CheckpointError: it cannot be had.
        HubUnavailable: the hub cannot be reached.
    """
    checkpoint.fetch(span_tensors(checkpoint, span).values())


def weight_types(checkpoint: Checkpoint, quantization: str) -> tuple[list[str], list[str]]:
    """The formats of packed weights: those that stay so, and those of which some tensor is expanded. Reads nothing."""
    largest = Span(checkpoint.largest_block, checkpoint.largest_block + 1)
    names = span_tensors(checkpoint, largest)
    return types_of(checkpoint, quantization, names, functools.partial(_empty_span, checkpoint, largest))


def _empty_span(checkpoint: Checkpoint, span: Span) -> PreTrainedModel:
    """The cut model without weights."""
    config, cut = _cut_class_of(checkpoint, span, {}, torch.float32)
    return without_weights(cut, config)


def _cut_class_of(
    checkpoint: Checkpoint, span: Span, layouts: Mapping[str, Layout], dtype: torch.dtype
) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    config = copy.deepcopy(checkpoint.config)

    def cut(base: PreTrainedModel) -> None:
        _cut_to_span(base, family=checkpoint.family, span=span)
        replace_packed(base, layouts, dtype)

    return config, cut_class(model_class_of(AutoModel, config), cut)


def _finished(base: PreTrainedModel, span: Span, family: Family, quantization: str) -> SpanModel:
    quantize(base, quantization, family.read_weights)
    return SpanModel(base, span, family)


def span_tensors(checkpoint: Checkpoint, span: Span) -> dict[str, str]:
    """The span's tensors: name in the cut base model -> name in the files, which may begin with that of the base."""
    prefix = model_class_of(AutoModel, checkpoint.config).base_model_prefix
    layer = re.compile(rf"(?:{re.escape(prefix)}\.)?{re.escape(checkpoint.family.layers)}\.(\d+)\.(.+)")
    names: dict[str, str] = {}
    for stored in checkpoint.weight_index:
        match = layer.fullmatch(stored)
        if match and span.start <= int(match[1]) < span.end:
            names[f"{checkpoint.family.layers}.{int(match[1]) - span.start}.{match[2]}"] = stored
    return names


class _NoPositions(nn.Module):
    """Adds nothing where a family adds learned positions: `edges` already did."""

    def forward(self, positions: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
        return torch.zeros((), device=positions.device, dtype=torch.int8)


def _cut_to_span(base: PreTrainedModel, *, family: Family, span: Span) -> None:
    keep_layers(base, family, range(span.start, span.end))
    for name in (family.embedding, family.norm, *family.bypassed):
        base.set_submodule(name, nn.Identity())
    if family.learned_positions is not None:
        base.set_submodule(family.learned_positions, _NoPositions())
    for name in family.unit_scalars:
        setattr(base, name, 1.0)
    for name in family.unit_settings:
        setattr(base.config, name, False)
