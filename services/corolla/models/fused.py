"""Runs transformer blocks of the shape that most families share, with little overhead.

The shared shape is: normalise, project to queries, keys and values, rotate, attend, project, add; normalise, gate,
project, add. Norms may also stand before the sums only, or at both places. In place of gate and projection there may be
a mixture of experts, which runs the family's own code. In small models, half of a decode step of `transformers` is
Python code around these operations. Here, one product replaces the projections of the same input, the rotary table is
made once for all layers, and there are no cache objects. The family's own modules are the reference for the results.
They share the weights until these are laid out in another way. All tensors of a call are on the device of the
weights.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol, Self, Union, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.models.adapters.products import AdapterBatch, Place
from corolla.models.families import FUSED, Family
from corolla.models.linear import DenseLinear, is_plain, replace_linears
from corolla.models.mixtures import Mixture
from corolla.models.packed.modules import PackedLinear
from corolla.models.rotary_table import RotaryTable, Turn

# Some families have one linear layer in place of several that read the same input.
_QUERY_KEY_VALUE: Final = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUTPUT: Final = (("o_proj",), ("dense",))
_GATE_UP: Final = (("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",), ("fc1",), ("c_fc",))
_DOWN: Final = (("down_proj",), ("fc2",), ("c_proj",))
_ACTIVATION: Final = (("act_fn",), ("activation_fn",), ("act",))
# The gate of attention's output.
_GATE: Final = (("gate_proj",),)
# The norms of queries and keys.
_HEAD_NORMS: Final = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
# Modules of an attention that a fused block has; with another one it would leave something out.
_ATTENTION_PARTS: Final = frozenset(itertools.chain(*_HEAD_NORMS, *_QUERY_KEY_VALUE, *_GATE, *_OUTPUT))
# The norms of attention's input and output, and of the MLP's input and output, as families name them. None: a block has
# no such norm. A block has the first of these rows of which it has all names.
_NORMS: Final = (
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("attention_layernorm", None, "feedforward_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", None, None, None),
)

PLACES: Final[tuple[Place, ...]] = tuple(
    tuple(f"{part}.{name}" for name in names)
    for part, alternatives in (("self_attn", (*_QUERY_KEY_VALUE, *_GATE, *_OUTPUT)), ("mlp", (*_GATE_UP, *_DOWN)))
    for names in alternatives
)
"""The linear layers of a block that are computed together, in all families."""
GATE_PLACE: Final[Place] = ("self_attn.gate_proj",)
"""The place of the gate of attention's output."""


class BlockNorm(Protocol):
    """A norm of a block.

    Attributes:
        weight: `[H]` in the model's dtype or float32, on its device: the factors of the numbers that are normalised
            together; `[heads, head_dim]` where each head has its own.
    """

    weight: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension of `hidden`, `[..., H]`; returns the same shape and dtype."""
        ...


Projection = Union[DenseLinear, PackedLinear, "_SideBySide"]
"""A linear layer with weights of any kind, from `[N, in]` to `[N, out]` in the same dtype."""

Attend = Callable[..., Tensor]
"""The attention of one batch, which stores new keys and values; see `AttentionBatch.attend` in `compute`."""


class FusedSpan:
    """The fused blocks of a span.

    Attributes:
        layers: the blocks in their order.
        rotaries: the rotary tables of the blocks, each once.
    """

    def __init__(self, layers: Sequence["FusedLayer"]) -> None:
        self.layers = tuple(layers)
        self.rotaries = tuple(dict.fromkeys(layer.rotary for layer in self.layers if layer.rotary is not None))

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[nn.Module],
        rotary: nn.Module,
        config: Any,
        family: Family,
        windows: Sequence[int | None],
    ) -> Self:
        """Fuses the blocks of a family.

        Args:
            layers: the decoder layers, for which `fits` must hold; plain weights become views of the fused weights.
            windows: the attention window of each layer; see `SpanModel`.
        """
        kinds = getattr(config, "layer_types", None) or [None] * len(windows)
        # Some families have a table for each kind of layer.
        own = [kind if kind in config.rope_parameters else None for kind in kinds]
        blocks = family.fused or FUSED
        tables = {
            kind: RotaryTable(
                rotary, config, in_pairs=blocks.rotates_pairs, has_paired_angles=blocks.has_paired_angles,
                scales_queries=blocks.scales_queries, kind=kind,
            )
            for kind in set(own)
        }  # fmt: skip
        return cls(
            [
                FusedLayer(
                    layer, window, tables[kind] if _rotates(layer, family) else None, norms_rotated=blocks.norms_rotated
                )
                for layer, window, kind in zip(layers, windows, own, strict=True)
            ]
        )

    @property
    def linears(self) -> list[DenseLinear]:
        """The projections with dense weights; packed projections have only one way to multiply."""
        projections = (each for layer in self.layers for each in layer.projections)
        return [each for each in projections if isinstance(each, DenseLinear)]

    @property
    def rotary_tables(self) -> tuple[Tensor, ...]:
        """The tables that `forward` reads in addition to weights and arguments; a higher `end` replaces them.

        See `RotaryTable.table`.
        """
        return tuple(rotary.table for rotary in self.rotaries)

    @property
    def first_of_kinds(self) -> tuple[int, ...]:
        """The indices of the first layer of each kind; see `FusedLayer.kind`."""
        firsts = {layer.kind: index for index, layer in reversed([*enumerate(self.layers)])}
        return tuple(sorted(firsts.values()))

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        end: int,
        layers: Sequence[int],
        attend: Attend,
        adapters: AdapterBatch | None = None,
    ) -> Tensor:
        """Runs some of the layers over the new tokens of all rows.

        Args:
            hidden: `[N, H]`, in the model's dtype; it is not changed.
            position_ids: int64 `[N]`, absolute positions.
            end: a number above all positions.
            layers: the layers' indices within the span.
            attend: stores new keys and values, and attends.
            adapters: the rows' adapters; None where no row has one.

        Returns:
            The output of the last layer: `[N, H]` in the same dtype.
        """
        turns = {rotary: rotary.turn(position_ids, end, hidden) for rotary in self.rotaries}
        for index in layers:
            layer = self.layers[index]
            turn = None if layer.rotary is None else turns[layer.rotary]
            hidden = layer.forward(hidden, turn, index, attend, adapters)
        return hidden


def fits(layer: nn.Module) -> bool:
    """A layer can be fused if its attention has the usual parts, and its projections are plain or packed."""
    attention, mlp = cast(Any, layer).self_attn, _mlp_of(layer)
    if not {name for name, _ in attention.named_children()} <= _ATTENTION_PARTS:
        return False
    if getattr(attention.config, "clip_qkv", None) is not None:
        return False
    projections = [_part(attention, each) for each in (_QUERY_KEY_VALUE, _OUTPUT)]
    if _has_gate(attention):
        projections.append(_part(attention, _GATE))
    if not _has_experts(mlp):
        projections += [_part(mlp, each) for each in (_GATE_UP, _DOWN)]
    return all(is_plain(each) or isinstance(each, PackedLinear) for each in itertools.chain(*projections))


def _mlp_of(layer: Any) -> Any:
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def _names(parent: nn.Module, alternatives: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of a module's linear layers that read the same input."""
    return next(names for names in alternatives if hasattr(parent, names[0]))


def _part(parent: nn.Module, alternatives: Sequence[tuple[str, ...]]) -> list[Any]:
    """The modules that have the first of these names that the parent has."""
    return [parent.get_submodule(name) for name in _names(parent, alternatives)]


def _place(name: str, parent: nn.Module, alternatives: Sequence[tuple[str, ...]]) -> Place:
    return tuple(f"{name}.{each}" for each in _names(parent, alternatives))


def _has_experts(mlp: Any) -> bool:
    return hasattr(mlp, "experts")


class GatedMlp:
    """The MLP of most families.

    Attributes:
        gate_up: the input projections, gate first, as one.
        down: the output projection.
        activation: the activation of the gate, or of the only input projection.
        num_gated: how many outputs the gate has.
        gates: whether there is a gate.
        places: the places of both projections.
    """

    def __init__(self, mlp: Any) -> None:
        (down,), (self.activation,) = _part(mlp, _DOWN), _part(mlp, _ACTIVATION)
        self.num_gated: int = down.in_features
        self.gates = sum(each.out_features for each in _part(mlp, _GATE_UP)) == 2 * self.num_gated
        self.gate_up = _fuse(mlp, _names(mlp, _GATE_UP))
        self.down = _dense(down)
        self.places: tuple[Place, Place] = (_place("mlp", mlp, _GATE_UP), _place("mlp", mlp, _DOWN))

    @property
    def projections(self) -> Iterator[Projection]:
        for each in (self.gate_up, self.down):
            yield from _parts(each)

    @property
    def kind(self) -> Hashable:
        """See `FusedLayer.kind`."""
        return self.num_gated

    def forward(self, normed: Tensor, index: int, adapters: AdapterBatch | None) -> Tensor:
        """Runs the MLP over the new tokens of all rows.

        Args:
            normed: `[N, H]`, in the model's dtype.
            index: the layer's index within the span.
            adapters: the rows' adapters; None where no row has one.

        Returns:
            `[N, H]` in the same dtype.
        """
        gate_up = self.gate_up.forward(normed)
        if adapters is not None:
            adapters.add(index, self.places[0], normed, gate_up)
        gated = self.gated(gate_up)
        down = self.down.forward(gated)
        if adapters is not None:
            adapters.add(index, self.places[1], gated, down)
        return down

    def gated(self, gate_up: Tensor) -> Tensor:
        """Activates what the input projections give.

        Args:
            gate_up: `[N, gated]`, or `[N, 2 gated]` where there is a gate, in the model's dtype.

        Returns:
            `[N, gated]` in the same dtype.
        """
        gated: Tensor = self.activation(gate_up.narrow(1, 0, self.num_gated))
        return gated * gate_up.narrow(1, self.num_gated, self.num_gated) if self.gates else gated


class MixtureMlp:
    """A mixture of experts, which runs the family's own code. Adapters change its linear layers by hooks.

    Attributes:
        projections: the linear layers that all tokens share.
        mixture: what the kernels for GPUs need of it; None: it has parts without a kernel.
        name: the name of the family's class.
    """

    def __init__(self, module: nn.Module) -> None:
        replace_linears(module)
        self.projections: list[Projection] = [
            each for each in module.modules() if isinstance(each, DenseLinear | PackedLinear)
        ]
        self.mixture = Mixture.from_module(module)
        self.name = type(module).__name__
        self._module = module

    @property
    def kind(self) -> Hashable:
        """See `FusedLayer.kind`."""
        return self.name if self.mixture is None else self.mixture.kind

    def forward(self, normed: Tensor, _index: int, _adapters: AdapterBatch | None) -> Tensor:
        """Runs the mixture over the new tokens of all rows; see `GatedMlp.forward`.

        Args:
            normed: `[N, H]`, in the model's dtype.

        Returns:
            `[N, H]` in the same dtype.
        """
        output: Any = self._module(normed.unsqueeze(0))
        # Some families' modules return what their router found, too.
        mixed: Tensor = output[0] if isinstance(output, tuple) else output
        return mixed[0]


class FusedLayer:
    """One fused block.

    Attributes:
        attention_norm: the norm of the block's input; None: there is none.
        output_norm: the norm of what attention adds; None in most families.
        mlp_norm: the norm of the MLP's input; None: there is none.
        mlp_output_norm: the norm of what the MLP adds; None in most families.
        query_norm: the norm of each query head, or of all of them together; None in most families.
        key_norm: likewise of key heads.
        norms_rotated: whether these norms follow the rotary embedding.
        hidden_size: the width of hidden states.
        device: the device of the weights.
        head_dim: the size of a head.
        num_heads: how many query heads there are.
        num_key_heads: how many key heads, and value heads, there are.
        query_key_value: the projections to queries, keys and values as one.
        output: the projection of attention's output.
        places: the places of both projections.
        gate: the projection whose logistic function is the factor of attention's output; None in most families.
        mlp: the MLP, or what stands in its place.
        is_parallel: whether the MLP reads what attention reads, not what attention has changed.
        rotary: the table by which queries and keys are rotated; None: they are not.
        scaling: the factor of attention scores.
        window: how many tokens a token sees, itself included; None: it sees all tokens before it.
        softcap: the bound of the scores; None: they are not bounded.
        sinks: `[heads]` in the model's dtype or float32, on `device`; see `Attend`. None: there are none.
        residual_multiplier: the factor of the outputs that are added to the hidden states.
    """

    def __init__(
        self, layer: Any, window: int | None, rotary: RotaryTable | None, *, norms_rotated: bool = False
    ) -> None:
        attention, mlp = layer.self_attn, _mlp_of(layer)
        names_of_norms = next(
            row for row in _NORMS if all(name is None or getattr(layer, name, None) is not None for name in row)
        )
        self.attention_norm, self.output_norm, self.mlp_norm, self.mlp_output_norm = (
            None if name is None else _norm(getattr(layer, name)) for name in names_of_norms
        )
        self.is_parallel = names_of_norms == _NORMS[-1]
        self.query_norm, self.key_norm = (_norm(each) for each in _head_norms(attention))
        self.norms_rotated = norms_rotated
        (output,) = _part(attention, _OUTPUT)
        self.hidden_size: int = output.out_features
        self.device: torch.device = next(layer.parameters()).device
        self.head_dim: int = attention.head_dim
        num_projected = sum(each.out_features for each in _part(attention, _QUERY_KEY_VALUE))
        self.num_heads: int = output.in_features // self.head_dim
        self.num_key_heads: int = (num_projected // self.head_dim - self.num_heads) // 2
        self.query_key_value = _fuse(attention, _names(attention, _QUERY_KEY_VALUE))
        self.places: tuple[Place, Place] = (
            _place("self_attn", attention, _QUERY_KEY_VALUE),
            _place("self_attn", attention, _OUTPUT),
        )
        self.output = _dense(output)
        self.gate = _fuse(attention, *_GATE) if _has_gate(attention) else None
        self.mlp = MixtureMlp(mlp) if _has_experts(mlp) else GatedMlp(mlp)
        self.rotary = rotary
        self.scaling: float = attention.scaling
        self.window = window
        self.softcap: float | None = getattr(attention, "attn_logit_softcapping", None)
        self.sinks: Tensor | None = getattr(attention, "sinks", None)
        self.residual_multiplier: float = getattr(layer, "residual_multiplier", 1.0)

    @property
    def own_places(self) -> tuple[Place, ...]:
        """The places of all projections that the block computes itself."""
        gates = () if self.gate is None else (GATE_PLACE,)
        return (*self.places, *gates, *(self.mlp.places if isinstance(self.mlp, GatedMlp) else ()))

    @property
    def projections(self) -> Iterator[Projection]:
        for each in (self.query_key_value, self.output, self.gate):
            yield from () if each is None else _parts(each)
        yield from self.mlp.projections

    @property
    def kind(self) -> Hashable:
        """What the kernels of a block depend on, weights not counted. All blocks of one kind launch the same ones."""
        return (
            self.num_heads, self.num_key_heads, self.head_dim, self.window, self.softcap, self.sinks is None,
            self.rotary is None, self.mlp.kind, self.residual_multiplier,
            *(getattr(each, "layout", None) for each in self.projections),
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        turn: Turn | None,
        index: int,
        attend: Attend,
        adapters: AdapterBatch | None,
    ) -> Tensor:
        """Runs the block over the new tokens of all rows; see `FusedSpan.forward`.

        Args:
            hidden: `[N, H]`, in the model's dtype; it is not changed.
            turn: how `rotary` turns the tokens; None: there is no such table.
            index: the layer's index within the span.
            attend: stores new keys and values, and attends.
            adapters: the rows' adapters; None where no row has one.

        Returns:
            `[N, H]` in the same dtype.
        """
        num_tokens, num_rotated = hidden.shape[0], self.num_heads + self.num_key_heads
        normed = _normed(self.attention_norm, hidden)
        projected = self.query_key_value.forward(normed)
        if adapters is not None:
            adapters.add(index, self.places[0], normed, projected)
        heads = projected.view(num_tokens, -1, self.head_dim)
        rotated = heads.narrow(1, 0, num_rotated)
        if not self.norms_rotated:
            rotated = self._normed_heads(rotated)
        if self.rotary is not None and turn is not None:
            rotated = rotate_heads(rotated, turn.cos, turn.sin, self.rotary.in_pairs)
        if self.norms_rotated:
            rotated = self._normed_heads(rotated)
        query = rotated.narrow(1, 0, self.num_heads)
        attended = attend(
            index,
            query if turn is None or turn.query_factors is None else query * turn.query_factors,
            rotated.narrow(1, self.num_heads, self.num_key_heads),
            heads.narrow(1, num_rotated, self.num_key_heads),
            scaling=self.scaling,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        attended = self.gated(attended.reshape(num_tokens, -1), normed, index, adapters)
        output = self.output.forward(attended)
        if adapters is not None:
            adapters.add(index, self.places[1], attended, output)
        hidden = self._add(hidden, _normed(self.output_norm, output))
        change = self.mlp.forward(normed if self.is_parallel else _normed(self.mlp_norm, hidden), index, adapters)
        return self._add(hidden, _normed(self.mlp_output_norm, change))

    def gated(self, attended: Tensor, normed: Tensor, index: int, adapters: Any) -> Tensor:
        """Attention's output behind its gate, if there is one.

        Args:
            attended: `[N, heads * head_dim]`, in the model's dtype.
            normed: `[N, H]` in the same dtype, what attention has read.
            index: the layer's index within the span.
            adapters: the rows' adapters, of a kind that blocks add; None where no row has one.

        Returns:
            `[N, heads * head_dim]` in the same dtype.
        """
        if self.gate is None:
            return attended
        opening = self.gate.forward(normed)
        if adapters is not None:
            adapters.add(index, GATE_PLACE, normed, opening)
        return attended * torch.sigmoid(opening)

    def _normed_heads(self, heads: Tensor) -> Tensor:
        """Normalises query heads and key heads, `[N, heads + key heads, head_dim]`."""
        if self.query_norm is None or self.key_norm is None:
            return heads
        query, key = torch.split(heads, [self.num_heads, self.num_key_heads], dim=1)
        return torch.cat((_normed_heads(self.query_norm, query), _normed_heads(self.key_norm, key)), dim=1)

    def _add(self, residual: Tensor, change: Tensor) -> Tensor:
        return residual + change if self.residual_multiplier == 1.0 else residual + change * self.residual_multiplier


def _head_norms(attention: Any) -> tuple[Any, Any]:
    """The norms of queries and keys, as the family's modules; None: there are none."""
    names = next((names for names in _HEAD_NORMS if hasattr(attention, names[0])), None)
    return (None, None) if names is None else (getattr(attention, names[0]), getattr(attention, names[1]))


def _has_gate(attention: nn.Module) -> bool:
    return any(hasattr(attention, name) for (name,) in _GATE)


def _rotates(layer: Any, family: Family) -> bool:
    attention = layer.self_attn
    if family.fused is None or not family.fused.rotates_windows:
        return bool(getattr(attention, "use_rope", True))
    if hasattr(attention, "is_sliding"):
        # EXAONE rotates all layers where the configuration has no window; Cohere has no such exception.
        return bool(attention.is_sliding or attention.sliding_window is None)
    return attention.sliding_window is not None


def _normed(norm: BlockNorm | None, hidden: Tensor) -> Tensor:
    return hidden if norm is None else norm(hidden)


def _normed_heads(norm: BlockNorm, heads: Tensor) -> Tensor:
    """Normalises `[N, heads, head_dim]`: each head, or all heads of a token together."""
    return norm(heads.reshape(len(heads), -1, norm.weight.shape[-1])).view(heads.shape)


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor, in_pairs: bool) -> Tensor:
    """Rotates the first numbers of heads, `[N, heads, head_dim]`, as many as the table has.

    Args:
        cos: `[N, 1, rotary size]`, the cosines of each token's position; `sin`: its signed sines; see `RotaryTable`.
        in_pairs: whether neighbours are rotated together.

    Returns:
        `[N, heads, head_dim]` in the dtype of `heads`.
    """
    size, head_dim = cos.shape[-1], heads.shape[-1]
    turning = heads if size == head_dim else heads.narrow(-1, 0, size)
    other = turning.view(*turning.shape[:-1], -1, 2).flip(-1).flatten(-2) if in_pairs else turning.roll(size // 2, -1)
    turned = torch.addcmul(turning * cos, other, sin).to(heads.dtype)
    return turned if size == head_dim else torch.cat((turned, heads.narrow(-1, size, head_dim - size)), dim=-1)


class _SideBySide:
    """Projections of the same input that cannot be joined, since they are not all packed in the same way.

    Attributes:
        parts: the projections, in the order of their outputs.
    """

    def __init__(self, parts: Sequence[Projection]) -> None:
        self.parts = parts

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part.forward(rows) for part in self.parts], dim=-1)


def _parts(projection: Projection) -> Sequence[Projection]:
    return projection.parts if isinstance(projection, _SideBySide) else (projection,)


def _dense(part: nn.Linear | PackedLinear) -> DenseLinear | PackedLinear:
    if isinstance(part, PackedLinear):
        return part
    return DenseLinear(cast(nn.Parameter, part.weight), cast(nn.Parameter | None, part.bias), parts=(part,))


def _fuse(parent: nn.Module, names: Sequence[str]) -> Projection:
    """Joins projections of the same input. Plain parts become views of the joined weights, which saves memory."""
    children = [parent.get_submodule(name) for name in names]
    packed = [child for child in children if isinstance(child, PackedLinear)]
    if len(packed) == len(children) and PackedLinear.can_join(packed):
        return PackedLinear.joined(packed)
    parts = cast(list[nn.Linear], children)
    if packed:
        return _SideBySide([_dense(part) for part in parts])
    fused = DenseLinear(
        _joined([part.weight for part in parts]), _joined_or_none([part.bias for part in parts]), parts=parts
    )
    sizes = [part.out_features for part in parts]
    for part, weight in zip(parts, torch.split(fused.weight, sizes), strict=True):
        part.weight = nn.Parameter(weight, requires_grad=False)
    if fused.bias is not None:
        for part, bias in zip(parts, torch.split(fused.bias, sizes), strict=True):
            part.bias = nn.Parameter(bias, requires_grad=False)
    return fused


def _joined(parameters: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([parameter.data for parameter in parameters]), requires_grad=False)


def _joined_or_none(parameters: Sequence[Tensor | None]) -> nn.Parameter | None:
    present = [parameter for parameter in parameters if parameter is not None]
    return _joined(present) if present else None


class RmsNorm:
    """The root mean square norm of most families (RMSNorm, Zhang and Sennrich 2019). It is one kernel call in float32.

    Attributes:
        weight: `[H]`.
        epsilon: added to the mean of the squares.
        module: the family's module.
    """

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.epsilon: float = module.variance_epsilon
        self.module = module
        self._shape = tuple(self.weight.shape)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalises the last dimension of `hidden`, `[..., H]`; returns the same shape and dtype."""
        if not hidden.dtype == self.weight.dtype == torch.float32:
            return cast(Tensor, self.module(hidden))
        return functional.rms_norm(hidden, self._shape, self.weight, self.epsilon)


class HeadNorm:
    """Normalises each head around its mean, by a layer norm of its own (StableLM 2).

    Attributes:
        weight: `[heads, head_dim]`.
        epsilon: added to the mean of the squares.
        module: the family's module.
    """

    def __init__(self, module: Any) -> None:
        self.weight = torch.stack([norm.weight.detach() for norm in module.norms])
        self.epsilon: float = module.norms[0].eps
        self.module = module

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalises the heads of `hidden`, `[N, heads, head_dim]`; returns the same shape and dtype."""
        return functional.layer_norm(hidden, hidden.shape[-1:], eps=self.epsilon) * self.weight


def _norm(module: Any) -> BlockNorm | None:
    """A norm with the results of a family's module, faster if that is the usual RMS norm; None: it changes nothing."""
    if module is None or isinstance(module, nn.Identity):
        return None
    if hasattr(module, "norms"):
        return HeadNorm(module)
    is_usual = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return RmsNorm(module) if is_usual else cast(BlockNorm, module)
