"""A span of blocks as a torch module: the family's own base model, cut down to some of its layers."""

import copy
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from corolla.chassis.errors import CheckpointError, InternalError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout
from corolla.models.adapters.products import AdapterBatch, Place
from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import (
    build_cut,
    change_modules,
    keep_layers,
    keep_layers_of_config,
    kind_of_layer,
    make_up,
    refuse_absurd,
)
from corolla.models.empty_model import cut_class, model_class_of, without_weights
from corolla.models.families import Family, packs_rows, short_factor_length
from corolla.models.fused import PLACES, FusedSpan, MixtureMlp, fits
from corolla.models.linear import DenseLinear, choose_products, replace_linears
from corolla.models.mtp import NOT_OF_LAYER, with_mtp_layer
from corolla.models.packed.choice import layouts_of, types_of
from corolla.models.packed.modules import (
    PackedExpertWeights,
    PackedLinear,
    lay_out_experts,
    make_up_packed,
    replace_packed,
)
from corolla.models.packed.trial import choose_packed_products
from corolla.models.product_rule import AUTO, Way
from corolla.models.quantization import pack_empty, quantizer
from corolla.models.rotary_table import LongRope
from corolla.models.visible_tokens import attention_windows
from corolla.wire.span import Span


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """The place at which a linear layer's product with an adapter is added.

    Attributes:
        place: the layer alone, or several layers that are computed together.
        first_column: the index of the layer's first output among the outputs of the place.
        shape: the sizes of the layer's input and output.
    """

    place: Place
    first_column: int
    shape: tuple[int, int]


class SpanModel:
    """Blocks `[span.start, span.end)` of a model, without embedding, final norm and head.

    The layers are numbered from 0 at `span.start`; this number is the layer's index in any cache. To run only some of
    the blocks, the model makes a view that shares the layers and keeps their numbers.

    Args:
        has_mtp_layer: whether the decoder layer of the multi-token prediction block follows the blocks; see `mtp`.

    Attributes:
        span: the blocks.
        all_blocks: the blocks, and the one behind them if that is the layer of the multi-token prediction block.
        config: the model's configuration, reduced to all blocks.
        family: the row of the table of families.
        windows: the attention window of each layer; see `attention_windows`.
        packs_rows: whether rows of different sessions may be packed into one call.
        dtype: the dtype of weights and hidden states.
        device: the device of the weights.
        fused: a faster implementation of the same blocks, if `make_fused` found one.
        adapters: the adapters of the batch that `forward` is about to run; None where no row has one.
        long_rope: the rotary embedding, if it has to know which tokens belong to long texts; else None.
    """

    def __init__(self, base: PreTrainedModel, span: Span, family: Family, *, has_mtp_layer: bool = False) -> None:
        self.span = span
        self.all_blocks = Span(span.start, span.end + 1) if has_mtp_layer else span
        self.family = family
        self.windows = attention_windows(base, family)
        self.packs_rows = packs_rows(family, base.config)
        self.dtype: torch.dtype = base.dtype
        self.device: torch.device = base.device
        self.fused: FusedSpan | None = None
        self.adapters: AdapterBatch | None = None
        self.long_rope = _separate_factors(base, family)
        self._takes_adapters = False
        self._is_laid_out = False
        self._base = base
        self._views: dict[Span, PreTrainedModel] = {self.all_blocks: base}

    @property
    def config(self) -> PretrainedConfig:
        return self._base.config

    @functools.cached_property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def windows_of_attentions(self) -> tuple[int | None, ...]:
        """The window of each attention, which is a layer in any cache."""
        return tuple(window for window in self.windows for _ in range(self.family.past.attentions))

    @property
    def mtp_layer(self) -> int | None:
        """The index of the layer of the multi-token prediction block; None without one."""
        return None if self.all_blocks == self.span else len(self.span)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and buffers."""
        tensors = (*self._base.parameters(), *self._base.buffers())
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def linears(self) -> list[DenseLinear]:
        """The linear layers whose products `make_fused` has chosen; others are packed or quantised."""
        if self.fused is not None:
            return self.fused.linears
        return [each for each in self.modules() if isinstance(each, DenseLinear)]

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the blocks, as `nn.Module.modules` returns them."""
        return self._base.modules()

    def make_fused(self, products: str = AUTO) -> None:
        """Chooses how this machine runs the blocks, once and for all: further calls change nothing.

        If it sets `fused`, nothing else may run the blocks from then on.

        Args:
            products: how a CPU multiplies; see `product_rule.way_of`.
        """
        if self._is_laid_out:
            return
        self._is_laid_out = True
        rotary = self.rotary
        if self.device.type == "cpu":
            lay_out_experts(self._base, products)
        if self.family.fused is not None and rotary is not None and self.packs_rows and all(map(fits, self.layers)):
            self.fused = FusedSpan.from_layers(self.layers, rotary, self.config, self.family, self.windows)
        kept = self.family.read_weights
        choose_products(
            replace_linears(self._base, kept) if self.fused is None else self.fused.linears, asked_for=products
        )
        if self.family.past.packs_states and self.device.type == "cpu" and products == AUTO:
            # Several rows need one call by panels, and otherwise a call each, also where weights are small.
            choose_products((each for each in self.linears if each.way == Way.LIBRARY), asked_for=Way.PANELS)
        if self.device.type == "cuda":
            choose_packed_products(self.packed_layers, self.dtype)

    @property
    def packed_layers(self) -> list[PackedLinear | PackedExpertWeights]:
        """The layers and experts that multiply by packed weights; layers that fused ones have joined do not."""
        experts = [each for each in self.modules() if isinstance(each, PackedExpertWeights)]
        layers: Iterable[object] = self.modules()
        if self.fused is not None:
            layers = (each for layer in self.fused.layers for each in layer.projections)
        return [*(each for each in layers if isinstance(each, PackedLinear)), *experts]

    def linear_place(self, layer: int, path: str) -> LinearPlace | None:
        """The place of a linear layer; None where the block has no such layer that sees each token exactly once.

        Args:
            layer: the block's index within the span.
            path: the linear layer's path within the block, such as `self_attn.q_proj`.
        """
        if path.endswith(self.family.read_weights):
            return None
        modules = dict(self.layers[layer].named_modules())
        if (shape := _features(modules.get(path))) is None:
            return None
        if self.fused is None:
            return LinearPlace((path,), 0, shape)
        place = next((each for each in self.fused.layers[layer].own_places if path in each), None)
        if place is None:
            # The family's own code runs a mixture, whose layers get hooks.
            is_in_mixture = isinstance(self.fused.layers[layer].mlp, MixtureMlp)
            return LinearPlace((path,), 0, shape) if is_in_mixture else None
        widths = [_features(modules[each]) or (0, 0) for each in place[: place.index(path)]]
        return LinearPlace(place, sum(width for _, width in widths), shape)

    def take_adapters(self) -> None:
        """Installs the hooks by which `adapters` change the outputs of linear layers.

        The blocks must not run meanwhile. Fused blocks need hooks only within mixtures of experts.
        """
        if self._takes_adapters:
            return
        self._takes_adapters = True
        for index in range(len(self.span)):
            for path, module in self.layers[index].named_modules():
                if (found := self.linear_place(index, path)) is not None and not self._adds_itself(found):
                    module.register_forward_hook(self._adding(index, (path,)))

    def _adds_itself(self, found: LinearPlace) -> bool:
        """The code that runs a layer adds the changes of adapters."""
        return self.fused is not None and found.place in PLACES

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

    @property
    def first_of_kinds(self) -> tuple[int, ...]:
        """The indices of the first layer of each kind; see `kind_of_layer`."""
        kinds: dict[Hashable, int] = {}
        for index, (window, layer) in enumerate(zip(self.windows, self.layers, strict=True)):
            kinds.setdefault((window, kind_of_layer(layer)), index)
        return tuple(kinds.values())

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks, as the family's own modules."""
        return list(cast(nn.ModuleList, self._base.get_submodule(self.family.layers)))

    @property
    def rotary(self) -> nn.Module | None:
        """The family's rotary embedding; None: it has none."""
        children = dict(self._base.named_children())
        return children.get("rotary_emb", children.get("pos_emb"))

    def set_attention(self, implementation: str) -> None:
        """Sets the attention function of all layers; `implementation` is a key of transformers' AttentionInterface."""
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
    ) -> Tensor:
        """Runs the blocks.

        Args:
            hidden: `[B, T, H]`, the output of the block before `blocks`, in the model's dtype and on its device.
            position_ids: int64 `[B, T]`, on the same device, absolute positions; None: those that follow the cached
                tokens.
            blocks: a run within `all_blocks`; None runs the whole span.
            past_key_values: a transformers cache, or None for attention functions that keep their own.

        Returns:
            The output of the last of `blocks`, before any final norm: `[B, T, H]` in the model's dtype.
        """
        output = self._view(blocks or self.span)(
            inputs_embeds=hidden,
            position_ids=position_ids,
            use_cache=past_key_values is not None,
            **{self.family.past.cache_argument: past_key_values},
        )
        return cast(Tensor, output.last_hidden_state)

    __call__ = forward

    def _view(self, blocks: Span) -> PreTrainedModel:
        view = self._views.get(blocks)
        if view is None:
            view = self._views[blocks] = self._cut_view(self.all_blocks.indices(blocks))
        return view

    def _cut_view(self, indices: range) -> PreTrainedModel:
        config = copy.deepcopy(self._base.config)
        keep_layers_of_config(config, indices)
        layers = cast(nn.ModuleList, self._base.get_submodule(self.family.layers))
        kept = nn.ModuleList(layers[index] for index in indices)
        return cast(PreTrainedModel, _with_layers(self._base, self.family.layers.split("."), kept, config))


def _with_layers(module: Any, path: Sequence[str], layers: nn.ModuleList, config: PretrainedConfig) -> Any:
    """A copy of a model with other layers at `path`; it shares all modules except those that contain the layers."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    view.config = config
    name, *inner = path
    view._modules[name] = _with_layers(view._modules[name], inner, layers, config) if inner else layers
    return view


def _separate_factors(base: PreTrainedModel, family: Family) -> LongRope | None:
    """Replaces a rotary embedding of the type `longrope` by one that chooses each row's factors by its own text."""
    short_length = short_factor_length(base.config)
    if short_length is None or not family.begins_anew:
        return None
    long_rope = LongRope(base.get_submodule("rotary_emb"), short_length)
    base.set_submodule("rotary_emb", long_rope)
    return long_rope


def _features(module: nn.Module | None) -> tuple[int, int] | None:
    """The input and output size of a linear layer of any class; None for other modules."""
    if isinstance(module, DenseLinear):
        return module.weight.shape[1], module.weight.shape[0]
    # A router may be a kind of linear layer that returns more than a product.
    if isinstance(module, nn.Embedding) or type(module).__name__.endswith("Router") or module is None:
        return None
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return sizes if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None  # type: ignore[return-value]


def load_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str = "none",
    has_mtp_layer: bool = False,
) -> SpanModel:
    """Reads a span's tensors, and only those, into a model.

    Args:
        dtype: the dtype of the weights in memory, whatever the files hold.
        quantization: how linear layers hold their weights: `none`; `int8` or `int4`, quantised after reading; `packed`,
            packed as in the files.
        has_mtp_layer: whether to read the decoder layer of the multi-token prediction block, too, which the checkpoint
            has; the span then ends with the model's last block.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or cannot be read.
        StartupError: this quantisation is not possible for the weights.
    """
    device = torch.device(device)
    if span.end > checkpoint.num_blocks:
        raise CheckpointError(
            f"{checkpoint.name} has {checkpoint.num_blocks} blocks, so it has no span {span}; ask for blocks within "
            f"0:{checkpoint.num_blocks}."
        )
    config = with_mtp_layer(checkpoint.config) if has_mtp_layer else copy.deepcopy(checkpoint.config)
    read = Span(span.start, span.end + 1) if has_mtp_layer else span
    kept = checkpoint.family.read_weights
    base = build_cut(
        checkpoint,
        model_class_of(AutoModel, config),
        config,
        functools.partial(cut_to_span, family=checkpoint.family, span=read),
        span_tensors(checkpoint, read),
        dtype=dtype,
        device=device,
        quantization=quantization,
        changing=lambda model: quantizer(model, quantization, kept, device),
    )
    return SpanModel(base, span, checkpoint.family, has_mtp_layer=has_mtp_layer)


def make_span(
    checkpoint: Checkpoint,
    span: Span,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str = "none",
) -> SpanModel:
    """A span like that of `load_span`, but with random weights: it reads no weights, and computes at the same speed.

    Raises:
        StartupError: this quantisation is not possible for the weights.
    """
    device = torch.device(device)
    names = span_tensors(checkpoint, span)
    layouts = layouts_of(checkpoint, names, quantization, device, functools.partial(empty_span, checkpoint, span))
    config, cut = _cut_class_of(checkpoint, span, layouts, dtype, device)
    empty = without_weights(cut, config)
    refuse_absurd(checkpoint, empty, names)
    base = make_up(cut, config, dtype=dtype, device=device, empty=empty)
    make_up_packed(base)
    base = cast(PreTrainedModel, cast(Any, base).to(device))
    change_modules(base, quantizer(base, quantization, checkpoint.family.read_weights))
    return SpanModel(base, span, checkpoint.family)


def weight_types(checkpoint: Checkpoint, quantization: str) -> tuple[list[str], list[str]]:
    """The formats of quantised weights, packed and expanded ones. Reads no weights."""
    largest = Span(checkpoint.largest_block, checkpoint.largest_block + 1)
    names = span_tensors(checkpoint, largest)
    return types_of(checkpoint, quantization, names, functools.partial(empty_span, checkpoint, largest))


def empty_span(
    checkpoint: Checkpoint, span: Span, dtype: torch.dtype = torch.float32, quantization: str = "none"
) -> PreTrainedModel:
    """The span's model without weights, on the meta device; layers that a GPU packs are packed.

    Args:
        quantization: see `load_span`.

    Raises:
        SettingsError: the checkpoint has no packed weights, or triton is not installed.
    """
    gpu = torch.device("cuda")
    layouts: Mapping[str, Layout] = {}
    if quantization == PACKED:
        names = span_tensors(checkpoint, span)
        layouts = layouts_of(checkpoint, names, quantization, gpu, functools.partial(empty_span, checkpoint, span))
    config, cut = _cut_class_of(checkpoint, span, layouts, dtype, gpu)
    base = cast(PreTrainedModel, cast(Any, without_weights(cut, config)).to(dtype))
    pack_empty(base, quantization, checkpoint.family.read_weights)
    return base


def _cut_class_of(
    checkpoint: Checkpoint, span: Span, layouts: Mapping[str, Layout], dtype: torch.dtype, device: torch.device
) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    config = copy.deepcopy(checkpoint.config)

    def cut(base: PreTrainedModel) -> None:
        cut_to_span(base, family=checkpoint.family, span=span)
        replace_packed(base, layouts, dtype, device)

    return config, cut_class(model_class_of(AutoModel, config), cut)


def span_tensors(checkpoint: Checkpoint, span: Span) -> dict[str, str]:
    """Maps the names of the span's tensors in the cut base model to those in the files, with or without a prefix.

    The block behind the model's last one is the decoder layer of the multi-token prediction block.
    """
    prefix = model_class_of(AutoModel, checkpoint.config).base_model_prefix
    layer = re.compile(rf"(?:{re.escape(prefix)}\.)?{re.escape(checkpoint.family.layers)}\.(\d+)\.(.+)")
    names: dict[str, str] = {}
    for name, stored in checkpoint.names.items():
        match = layer.fullmatch(name)
        if match and span.start <= int(match[1]) < span.end:
            if int(match[1]) == checkpoint.num_blocks and match[2].startswith(NOT_OF_LAYER):
                continue
            names[f"{checkpoint.family.layers}.{int(match[1]) - span.start}.{match[2]}"] = stored
    if not names and len(span):
        other = next((each for each in checkpoint.weight_index if f"{checkpoint.family.layers}." in each), "none")
        raise CheckpointError(
            f"{checkpoint.name} names the tensors of its blocks as {other!r}, where a {checkpoint.family.model_type} "
            f"model has {prefix}.{checkpoint.family.layers}.0.…; give a checkpoint in the layout of transformers."
        )
    return names


class _NoPositions(nn.Module):
    """Stands in for learned positions and adds 0, since `edges.Edges` has added the positions already."""

    def forward(self, positions: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
        return torch.zeros((), device=positions.device, dtype=torch.int8)


def cut_to_span(base: PreTrainedModel, *, family: Family, span: Span) -> None:
    """Cuts a base model, in place, to the blocks of a span, without what runs before and after them."""
    keep_layers(base, family, range(span.start, span.end))
    for name in (family.embedding, family.norm, *family.bypassed):
        base.set_submodule(name, nn.Identity())
    if family.learned_positions is not None:
        base.set_submodule(family.learned_positions, _NoPositions())
    for name in family.unit_scalars:
        setattr(base, name, 1.0)
    for name in family.unit_settings:
        setattr(base.config, name, False)
    for name in family.set_in_blocks:
        for module in base.modules():
            if hasattr(module, name):
                setattr(module, name, tuple(getattr(base.config, name)))
