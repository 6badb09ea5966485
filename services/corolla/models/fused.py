"""Blocks of the common shape, run with little bookkeeping.

Many families share one block: normalise, project to queries, keys and values, rotate, attend, project, add; normalise,
gate, project, add. In small models half of a decode step of `transformers` is Python around these. Here the projections
that read the same input are one, the rotary table is made once for all layers, and there are no cache objects. The
family's own modules stay the reference: they share the weights until those are laid out anew, and both must give the
same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.models.adapters.products import AdapterBatch, Place
from corolla.models.families import attention_windows
from corolla.models.linear import TunedLinear, is_plain
from corolla.models.packed.modules import PackedLinear
from corolla.models.rotary_table import RotaryTable

_QUERY_KEY_VALUE: Final = ("q_proj", "k_proj", "v_proj")
_GATE_UP: Final = ("gate_proj", "up_proj")

PLACES: Final[tuple[Place, ...]] = (
    tuple(f"self_attn.{name}" for name in _QUERY_KEY_VALUE),
    ("self_attn.o_proj",),
    tuple(f"mlp.{name}" for name in _GATE_UP),
    ("mlp.down_proj",),
)
"""Linear layers that are computed together, in the order of a block."""
_QUERY_KEY_VALUE_PLACE, _OUTPUT_PLACE, _GATE_UP_PLACE, _DOWN_PLACE = PLACES


class Projection(Protocol):
    """`[N, in]` to `[N, out]`, by weights of any kind."""

    def forward(self, rows: Tensor) -> Tensor: ...


class Attend(Protocol):
    """Attention of a batch, which knows the rows and their caches."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Stores new keys and values and attends.

        Args:
            layer: index within the span.
            query: `[N, heads, head_dim]`, one entry for each new token of all rows.
            key: `[N, key heads, head_dim]`; value likewise.
            scaling: of the scores.
            window: how many tokens, itself included, a token sees; None for all before it.
            softcap: bound of the scores, or None.

        Returns:
            `[N, heads, head_dim]`.
        """
        ...


class PackedLayers(Protocol):
    """Runs layers over rows of different sessions that are packed into one call."""

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        end: int,
        layers: range,
        attend: Attend,
        adapters: AdapterBatch | None = None,
    ) -> Tensor:
        """Runs some of the layers over the new tokens of all rows.

        Args:
            hidden: `[N, H]`, in the model's dtype; it is not changed.
            position_ids: int64 `[N]`, absolute positions.
            end: more than any of them.
            layers: which, by their index within the span.
            attend: stores new keys and values, and attends.
            adapters: of the rows; None where no row has one.

        Returns:
            `[N, H]`.
        """
        ...


class FusedSpan:
    """The blocks of a span.

    Args:
        layers: the family's decoder layers, for which `fits` must hold; their projections become views of fused ones.
        rotary: the family's rotary embedding.
        config: the family's configuration.
    """

    def __init__(self, layers: Sequence[nn.Module], rotary: nn.Module, config: Any) -> None:
        windows = attention_windows(config)
        self._layers = [_FusedLayer(layer, window) for layer, window in zip(layers, windows, strict=True)]
        self._rotary = RotaryTable(rotary, config)

    @property
    def linears(self) -> list[TunedLinear]:
        """The projections that can be tuned; packed ones are multiplied in one way only."""
        projections = (each for layer in self._layers for each in layer.projections)
        return [each for each in projections if isinstance(each, TunedLinear)]

    @property
    def rotary_table(self) -> Tensor:
        """What `forward` reads apart from weights and arguments, until it is asked for a higher `end`."""
        return self._rotary.table

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
        cos, sin = self._rotary.rows(position_ids, end, hidden)
        for index in layers:
            hidden = self._layers[index].forward(hidden, cos, sin, index, attend, adapters)
        return hidden


def fits(layer: nn.Module) -> bool:
    """Whether the projections of a decoder layer can be fused: plain or packed linear layers, not quantised ones."""
    projections = [
        *(layer.get_submodule(f"self_attn.{name}") for name in (*_QUERY_KEY_VALUE, "o_proj")),
        *(layer.get_submodule(f"mlp.{name}") for name in (*_GATE_UP, "down_proj")),
    ]
    return all(is_plain(each) or isinstance(each, PackedLinear) for each in projections)


class _FusedLayer:
    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention_norm = _norm(layer.input_layernorm)
        self._mlp_norm = _norm(layer.post_attention_layernorm)
        self._query_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._key_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_key_heads = attention.k_proj.out_features // self._head_dim
        self._num_gated: int = mlp.gate_proj.out_features
        self._query_key_value = _fuse(attention, _QUERY_KEY_VALUE)
        self._output = _tuned(attention.o_proj)
        self._gate_up = _fuse(mlp, _GATE_UP)
        self._down = _tuned(mlp.down_proj)
        self._activation = mlp.act_fn
        self._rotates = bool(getattr(attention, "use_rope", True))
        self._scaling: float = attention.scaling
        self._window = window
        self._residual_multiplier: float = getattr(layer, "residual_multiplier", 1.0)

    @property
    def projections(self) -> Iterator[Projection]:
        for each in (self._query_key_value, self._output, self._gate_up, self._down):
            yield from each.parts if isinstance(each, _SideBySide) else (each,)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, index: int, attend: Attend, adapters: AdapterBatch | None
    ) -> Tensor:
        num_tokens, num_rotated = hidden.shape[0], self._num_heads + self._num_key_heads
        normed = self._attention_norm(hidden)
        projected = self._query_key_value.forward(normed)
        if adapters is not None:
            adapters.add(index, _QUERY_KEY_VALUE_PLACE, normed, projected)
        heads = projected.view(num_tokens, -1, self._head_dim)
        rotated = heads.narrow(1, 0, num_rotated)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = torch.split(rotated, [self._num_heads, self._num_key_heads], dim=1)
            rotated = torch.cat((self._query_norm(query), self._key_norm(key)), dim=1)
        if self._rotates:
            rotated = torch.addcmul(rotated * cos, rotated.roll(self._head_dim // 2, -1), sin)
        attended = attend(
            index,
            rotated.narrow(1, 0, self._num_heads),
            rotated.narrow(1, self._num_heads, self._num_key_heads),
            heads.narrow(1, num_rotated, self._num_key_heads),
            scaling=self._scaling,
            window=self._window,
        )
        attended = attended.reshape(num_tokens, -1)
        output = self._output.forward(attended)
        if adapters is not None:
            adapters.add(index, _OUTPUT_PLACE, attended, output)
        hidden = self._add(hidden, output)
        normed = self._mlp_norm(hidden)
        gate_up = self._gate_up.forward(normed)
        if adapters is not None:
            adapters.add(index, _GATE_UP_PLACE, normed, gate_up)
        gated = self._activation(gate_up.narrow(1, 0, self._num_gated)) * gate_up.narrow(
            1, self._num_gated, self._num_gated
        )
        down = self._down.forward(gated)
        if adapters is not None:
            adapters.add(index, _DOWN_PLACE, gated, down)
        return self._add(hidden, down)

    def _add(self, residual: Tensor, change: Tensor) -> Tensor:
        return residual + change if self._residual_multiplier == 1.0 else residual + change * self._residual_multiplier


class _SideBySide:
    """Projections of the same input that cannot be one.

    Attributes:
        parts: the projections, in the order of their outputs.
    """

    def __init__(self, parts: Sequence[Projection]) -> None:
        self.parts = parts

    def forward(self, rows: Tensor) -> Tensor:
        return torch.cat([part.forward(rows) for part in self.parts], dim=-1)


def _tuned(part: nn.Linear | PackedLinear) -> TunedLinear | PackedLinear:
    if isinstance(part, PackedLinear):
        return part
    return TunedLinear(cast(nn.Parameter, part.weight), cast(nn.Parameter | None, part.bias), parts=(part,))


def _fuse(parent: nn.Module, names: Sequence[str]) -> Projection:
    """One projection for several of the same input; the parts become views of its weights, so nothing is held twice."""
    children = [parent.get_submodule(name) for name in names]
    packed = [child for child in children if isinstance(child, PackedLinear)]
    if len(packed) == len(children) and PackedLinear.can_join(packed):
        return PackedLinear.joined(packed)
    parts = cast(list[nn.Linear], children)
    if packed:
        return _SideBySide([_tuned(part) for part in parts])
    fused = TunedLinear(
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


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """The same numbers as the family's normalisation, in one kernel where it is the usual one in float32."""
    if not hasattr(module, "variance_epsilon") or module.weight.dtype != torch.float32:
        return cast(Callable[[Tensor], Tensor], module)
    weight, epsilon = module.weight, module.variance_epsilon
    shape = tuple(weight.shape)
    return lambda hidden: functional.rms_norm(hidden, shape, weight, epsilon)
