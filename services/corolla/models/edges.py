"""Both ends of a model: from token ids to the first block's input, and from the last block's output to logits.

Both run the family's own code. The embedding is the family's base model without layers and norm; the head is its causal
language model around a base model that only applies the final norm. So scales, learned positions, layer norms and logit
caps equal those of `transformers`, bit for bit.
"""

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from corolla.chassis.errors import InternalError
from corolla.chassis.weight_formats import PACKED
from corolla.kernels.layouts import Layout
from corolla.models.checkpoint import Checkpoint
from corolla.models.cut_model import (
    build_cut,
    keep_layers,
    keep_layers_of_config,
    refuse_leftovers,
    renaming,
)
from corolla.models.empty_model import model_class_of, without_weights
from corolla.models.families import Family
from corolla.models.invariant import invariant_norm
from corolla.models.linear import DenseLinear, choose_products, replace_linears, ways_by_shape
from corolla.models.packed.modules import PackedLinear
from corolla.models.packed.trial import choose_packed_products
from corolla.models.product_rule import AUTO
from corolla.models.quantized.tensors import likely_layouts

# The head's name in most families, and in all that are served from GGUF files.
_HEAD: Final = "lm_head.weight"
# transformers makes no masks for a way to attend that it does not know. Before it makes them it reads the position ids,
# for which a step that was launched ahead would wait.
_WITHOUT_MASKS: Final = "none"

Part = TypeVar("Part", bound=nn.Module)


class Edges:
    """The embedding before block 0, and the final norm and head after the last block; a server may have only one end.

    Arguments may be on any device; results are on the device of the weights.

    Args:
        embedding_model: a base model without layers and norm; None: there is no embedding.
        head_model: a causal model whose base model only applies the final norm; None: there is no head.
        dtype: the dtype of hidden states; packed weights have another one.

    Attributes:
        is_lookup: whether `embed` only looks rows up, which takes microseconds for a few tokens.
    """

    def __init__(
        self,
        family: Family,
        embedding_model: PreTrainedModel | None,
        head_model: PreTrainedModel | None,
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        self._models = [model for model in (embedding_model, head_model) if model is not None]
        self._embedding_model = embedding_model
        self._head_model = head_model
        self._embedding_path = family.embedding
        self._embedding = None if embedding_model is None else embedding_model.get_submodule(family.embedding)
        self.find_device()
        # The base model's forward would only add overhead to a plain lookup, half a millisecond for each token.
        self.is_lookup = not (
            family.learned_positions or family.bypassed or family.unit_scalars or family.unit_settings
        )
        # Given embeddings go through every base model, and mpt's fails without a mask.
        if embedding_model is not None and not self.is_lookup:
            embedding_model.config._attn_implementation = _WITHOUT_MASKS

    @property
    def config(self) -> PretrainedConfig:
        return self._models[0].config

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def find_device(self) -> None:
        """Finds out on which device the weights are, after they were moved."""
        # A step asks for the device several times, and a search among all parameters takes longer than a launch.
        model = self._models[0]
        self._device = next(tensor.device for tensor in itertools.chain(model.parameters(), model.buffers()))

    @property
    def embedding(self) -> nn.Module:
        """The token embedding."""
        return _present(self._embedding)

    @embedding.setter
    def embedding(self, module: nn.Module) -> None:
        _present(self._embedding_model).set_submodule(self._embedding_path, module)
        self._embedding = module
        self.find_device()

    @property
    def output_embedding(self) -> nn.Module:
        """The head without the final norm."""
        head = _present(self._head_model)
        # The getter of most families asks the base model first, which has no embedding here.
        return cast(nn.Module, getattr(head, "lm_head", None) or head.get_output_embeddings())

    @output_embedding.setter
    def output_embedding(self, module: nn.Module) -> None:
        _present(self._head_model).set_output_embeddings(module)
        self.find_device()

    def tie(self) -> None:
        """Makes the head share the embedding's weights, if that is the family's way."""
        head = _present(self._head_model)
        if head._tied_weights_keys:
            output, weight = self.output_embedding, cast(nn.Parameter, self.embedding.weight)
            output.weight = weight
            head._adjust_bias(output, weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and buffers; tied ones count once."""
        tensors = {id(each): each for model in self._models for each in (*model.parameters(), *model.buffers())}
        return sum(tensor.nbytes for tensor in tensors.values())

    @property
    def has_embedding(self) -> bool:
        return self._embedding_model is not None

    @property
    def has_head(self) -> bool:
        return self._head_model is not None

    @property
    def modules(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The embedding's model and the head's model, where both are loaded; they share tied weights."""
        return _present(self._embedding_model), _present(self._head_model)

    def choose_products(self, asked_for: str = AUTO) -> None:
        """Chooses how this machine multiplies by the head's weights; for `asked_for` see `product_rule.way_of`.

        On a GPU, norm and product are chosen so that no row's logits depend on the other rows.

        A head that is tied to a large embedding keeps the plain weights that both share.
        """
        embedding = () if self._embedding_model is None else tuple(self._embedding_model.parameters())
        head = _present(self._head_model)
        choose_products(replace_linears(head), shared=embedding, asked_for=asked_for)
        if self.device.type == "cuda":
            choose_packed_products((each for each in head.modules() if isinstance(each, PackedLinear)), self.dtype)
            for module in head.modules():
                if isinstance(module, _NormOnly):
                    module.norm = invariant_norm(module.norm)

    @property
    def product_ways(self) -> dict[str, str]:
        """How this machine multiplies by the weights of the head, by their shape; see `ways_by_shape`."""
        if self._head_model is None:
            return {}
        return ways_by_shape(each for each in self._head_model.modules() if isinstance(each, DenseLinear))

    @torch.no_grad()
    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The input of block 0, `[T, H]` in the model's dtype, for `token_ids` and `position_ids`, int64 `[T]` each."""
        if self.is_lookup:
            return cast(Tensor, _present(self._embedding)(token_ids.to(self.device)))
        return self._first_input(position_ids, input_ids=token_ids.to(self.device).unsqueeze(0))

    @torch.no_grad()
    def embed_given(self, embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Like `embed`, for given embeddings `[T, H]` of any dtype: applies the family's positions, scale and norm.

        `position_ids` are int64 `[T]`.
        """
        rows = embeddings.to(device=self.device, dtype=self.dtype).unsqueeze(0)
        return self._first_input(position_ids, inputs_embeds=rows)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """The next-token logits, float32 `[R, V]`, for rows of any sessions.

        `hidden` is `[R, H]` in any floating-point dtype: the last block's output.
        """
        rows = hidden.to(device=self.device, dtype=self.dtype).unsqueeze(0)
        output = _present(self._head_model)(inputs_embeds=rows, use_cache=False)
        return cast(Tensor, output.logits)[0].float().contiguous()

    @torch.no_grad()
    def norm(self, hidden: Tensor) -> Tensor:
        """The hidden states after the final norm, `[R, H]` in the model's dtype, for rows of any sessions.

        `hidden` is `[R, H]` in any floating-point dtype: the last block's output.
        """
        rows = hidden.to(device=self.device, dtype=self.dtype).unsqueeze(0)
        norm = next(each for each in _present(self._head_model).modules() if isinstance(each, _NormOnly))
        return cast(Tensor, norm(inputs_embeds=rows).last_hidden_state)[0]

    def _first_input(self, position_ids: Tensor, **tokens: Tensor) -> Tensor:
        positions = position_ids.to(self.device).unsqueeze(0)
        output = _present(self._embedding_model)(**tokens, position_ids=positions, use_cache=False)
        return cast(Tensor, output.last_hidden_state)[0]


def load_edges(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    has_embedding: bool = True,
    has_head: bool = True,
    quantization: str = "none",
) -> Edges:
    """Reads the embedding, or the final norm and head, or all of them, and nothing else.

    If both are read, a tied head shares the embedding's weights, unless a GGUF file's head stays packed.

    Args:
        dtype: the dtype of hidden states, and of weights that are not packed.
        quantization: `packed`: weights stay packed as in the files; otherwise they are expanded to `dtype`.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or cannot be read; or the
            checkpoint holds a tensor that neither the edges nor the blocks use.
        StartupError: this machine cannot multiply by packed weights.
    """
    family, device = checkpoint.family, torch.device(device)
    config = copy.deepcopy(checkpoint.config)
    _refuse_other_tensors(checkpoint)
    if not has_head:
        names = edge_tensors(checkpoint, has_head=False)
        model_class, cut_to = model_class_of(AutoModel, config), functools.partial(_cut_to_embedding, family=family)
        model = build_cut(
            checkpoint, model_class, config, cut_to, names, dtype=dtype, device=device, quantization=quantization
        )
        return Edges(family, model, None, dtype)
    # Tied weights are read under the embedding's name, unless the head keeps them packed.
    packed_head = _packed_head(checkpoint, quantization)
    reads_embedding = has_embedding or (checkpoint.has_tied_edges and not packed_head)
    names = edge_tensors(checkpoint, has_embedding=reads_embedding)
    if packed_head:
        names |= packed_head
        config.tie_word_embeddings = False
    causal_class = model_class_of(AutoModelForCausalLM, config)
    cut_to = functools.partial(_drop_layers, family=family, has_embedding=reads_embedding)
    causal_model = build_cut(
        checkpoint, causal_class, config, cut_to, names, dtype=dtype, device=device, quantization=quantization
    )
    base = cast(PreTrainedModel, causal_model.base_model)
    norm = base.get_submodule(family.norm)
    base.set_submodule(family.norm, nn.Identity())
    around_layers = family.layers.split(".")[:-1]
    only_norm = _NormOnly(norm)
    for name in family.head_scalars:
        setattr(only_norm, name, getattr(base, name))
    causal_model.set_submodule(causal_model.base_model_prefix, _at(around_layers, only_norm))
    return Edges(family, base if has_embedding else None, causal_model, dtype)


def head_bytes(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str = "none") -> int:
    """Bytes of the head's weights in memory, without reading them."""
    shape = (checkpoint.vocab_size, checkpoint.hidden_size)
    layout: Layout | None = None
    if checkpoint.gguf is not None:
        packed = _packed_head(checkpoint, quantization)
        layout = next(map(checkpoint.gguf.tensors.layout, packed.values()), None)
    elif checkpoint.quantization is not None and quantization == PACKED:
        names = edge_tensors(checkpoint, has_embedding=False)
        layout = likely_layouts(checkpoint.quantization, names, {_HEAD: shape}).get(_HEAD)
    if layout is not None:
        return layout.num_bytes(*shape)
    return math.prod(shape) * dtype.itemsize


def _packed_head(checkpoint: Checkpoint, quantization: str) -> dict[str, str]:
    """Maps the head's name in the model to its name in a GGUF file; empty unless the head stays packed."""
    if checkpoint.gguf is None or quantization != PACKED:
        return {}
    stored = _HEAD
    if checkpoint.has_tied_edges:
        (stored,) = edge_tensors(checkpoint, has_head=False).values()
    return {_HEAD: stored} if checkpoint.gguf.tensors.layout(stored) is not None else {}


def edge_tensors(checkpoint: Checkpoint, *, has_embedding: bool = True, has_head: bool = True) -> dict[str, str]:
    """Maps the names of the edges' tensors in the model that `load_edges` builds to their names in the files.

    Without the head, that model is a base model, whose names lack the prefix that the files may have. Other tensors of
    the files, such as blocks that predict further tokens, or a vision tower, are left out.
    """
    family = checkpoint.family
    prefix = rf"(?:{re.escape(model_class_of(AutoModel, checkpoint.config).base_model_prefix)}\.)?"
    layer = _layer_name(checkpoint)
    parts = "|".join(re.escape(name) for name in _embedding_parts(family))
    embedding = re.compile(rf"{prefix}((?:{parts})\..+)")
    names: dict[str, str] = {}
    is_of_ends = _ends_of(checkpoint) if has_head else embedding.fullmatch
    for name, stored in checkpoint.names.items():
        if layer.match(name) or not is_of_ends(name):
            continue
        match = embedding.fullmatch(name)
        if match and has_embedding:
            names[name if has_head else match[1]] = stored
        elif not match and has_head:
            names[name] = stored
    if (
        not has_head
        and checkpoint.has_tied_edges
        and not any(each.startswith(f"{family.embedding}.") for each in names)
    ):
        # Files may store tied weights under the head's name alone.
        tied = model_class_of(AutoModelForCausalLM, checkpoint.config)._tied_weights_keys or ()
        heads = {name for name in tied if name.endswith(".weight")}
        names |= {f"{family.embedding}.weight": stored for name, stored in checkpoint.names.items() if name in heads}
    return names


def _refuse_other_tensors(checkpoint: Checkpoint) -> None:
    model_class = model_class_of(AutoModelForCausalLM, checkpoint.config)
    ends = edge_tensors(checkpoint)
    layer = _layer_name(checkpoint)
    others = (name for name in checkpoint.names if name not in ends and not layer.match(name))
    refuse_leftovers(checkpoint, others, model_class)


def _layer_name(checkpoint: Checkpoint) -> re.Pattern[str]:
    """The beginning of the names of all tensors of blocks."""
    prefix = model_class_of(AutoModel, checkpoint.config).base_model_prefix
    return re.compile(rf"(?:{re.escape(prefix)}\.)?{re.escape(checkpoint.family.layers)}\.\d+\.")


def _ends_of(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Returns a function that says whether a stored tensor, or part of a packed tensor, belongs to the edges."""
    config = copy.deepcopy(checkpoint.config)
    keep_layers_of_config(config, range(0))
    causal_class = model_class_of(AutoModelForCausalLM, config)
    ends = without_weights(causal_class, config)
    name_of = renaming(ends)
    modules = tuple({name.rpartition(".")[0] + "." for name in ends.state_dict()})

    def is_of_ends(stored: str) -> bool:
        names = (stored, f"{causal_class.base_model_prefix}.{stored}", name_of(stored))
        return any(name.startswith(modules) for name in names)

    return is_of_ends


def _embedding_parts(family: Family) -> tuple[str, ...]:
    positions = () if family.learned_positions is None else (family.learned_positions,)
    return (family.embedding, *family.bypassed, *positions)


def _cut_to_embedding(base: PreTrainedModel, *, family: Family) -> None:
    keep_layers(base, family, range(0))
    base.set_submodule(family.norm, nn.Identity())


def _drop_layers(causal_model: PreTrainedModel, *, family: Family, has_embedding: bool) -> None:
    base = cast(PreTrainedModel, causal_model.base_model)
    keep_layers(base, family, range(0))
    if not has_embedding:
        for name in _embedding_parts(family):
            base.set_submodule(name, nn.Identity())


def _at(path: Sequence[str], part: nn.Module) -> nn.Module:
    """A module that contains only `part`, at `path`."""
    for name in reversed(path):
        part = nn.ModuleDict({name: part})
    return part


def _present(part: Part | None) -> Part:
    if part is None:
        raise InternalError("this end of the model was not loaded")
    return part


@dataclass
class _NormedOutput(BaseModelOutputWithPastAndCrossAttentions):
    """A base model's output with all fields that any family's head reads, of experts and of Mamba too."""

    router_logits: tuple[Tensor, ...] | None = None
    cache_params: None = None
    shared_kv_states: None = None


class _NormOnly(nn.Module):
    """Stands in for the base model within the head's model, and only applies the final norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *_arguments: Any, inputs_embeds: Tensor, **_options: Any) -> _NormedOutput:
        return _NormedOutput(last_hidden_state=self.norm(inputs_embeds))
