"""Blocks with recurrent states, for rows of one token each, on CPUs: all rows in one call.

No number of a row depends on the other rows. torch's operators do not keep that rule by themselves: a product rounds
one row otherwise than several, and the last numbers of a tensor, which do not fill whole vectors, get another function
than those before. So weights in panels multiply all rows together, and other weights one row after the other, and
functions of single numbers see each row filled up to whole vectors (`apart`).

The family's own modules are the reference for the results, and hold the weights. All tensors of a call are on the CPU;
hidden states have the model's dtype, states float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.cache.states import LayerState
from corolla.compute.attention.base import AttentionBatch, PackedRow
from corolla.compute.base import Blocks, PackedStep, RowWork
from corolla.compute.reference import FamilyRows
from corolla.kernels.compiler import why_unavailable
from corolla.kernels.delta_rule import can_step, step_states
from corolla.models.adapters.products import AdapterStacks
from corolla.models.fused import rotate_heads
from corolla.models.packed.modules import PackedExperts, PackedExpertWeights, PackedLinear, are_usual
from corolla.models.rotary_table import RotaryTable
from corolla.models.span_model import SpanModel

# Two vectors of the largest registers, in the smallest type: torch's loops take so many numbers in a round.
_WHOLE_VECTORS: Final = 64
# torch cuts larger tensors among threads, between any two numbers.
_MAX_UNCUT: Final = 1 << 15
# What transformers adds to the squared lengths of queries and keys.
_EPSILON: Final = 1e-6


class SingleRows(Blocks):
    """Runs rows of one token each together, and other rows by the family's own code.

    These others are prompts, rows that begin, and rows with adapters.

    Args:
        model: the span; `fits` holds for it.
        stacks: the stacked copies of adapters.
    """

    name: Final = "rows"

    def __init__(self, model: SpanModel, stacks: AdapterStacks) -> None:
        super().__init__(stacks, model.device)
        self._model = model
        self._others = FamilyRows(model, stacks)
        self._rotary = RotaryTable(model.rotary, model.config)
        self._layers = [_Block(layer, index) for index, layer in enumerate(model.layers)]

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. A step without rows runs attention only, for one token."""
        ends = list(accumulate(row.num_tokens for row in step.rows))
        singles = [number for number, row in enumerate(step.rows) if _is_single(row)]
        if len(singles) == len(step.rows):
            return self._together(step, step.batch, hidden, layers)
        output = torch.empty_like(hidden)
        for are_single in (True, False):
            numbers = [number for number, row in enumerate(step.rows) if _is_single(row) == are_single]
            if not numbers:
                continue
            rows = [step.rows[number] for number in numbers]
            places = torch.cat(
                [torch.arange(ends[number] - step.rows[number].num_tokens, ends[number]) for number in numbers]
            )
            part = PackedStep(rows, step.position_ids[places], step.end, step.batch)
            if are_single:
                packed = [PackedRow(row.cache, row.position, place, place + 1) for place, row in enumerate(rows)]
                batch = AttentionBatch(step.batch.store, packed, step.batch.backend)
                output[places] = self._together(part, batch, hidden[places], layers)
            else:
                output[places] = self._others.forward(part, hidden[places], layers)
        return output

    def _together(self, step: PackedStep, batch: AttentionBatch, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        self._model.adapters = None  # those of a step belong to the other rows
        rows = _Rows(step.rows, batch, self._rotary.rows(step.position_ids, step.end, hidden))
        for index in layers:
            hidden = self._layers[index].forward(hidden, rows)
        return hidden


def fits(model: SpanModel) -> bool:
    """`SingleRows` can run the blocks of a span."""
    return (
        model.family.past.packs_singles
        and model.device.type == "cpu"
        and why_unavailable() is None
        and all(_Block.fits(layer) for layer in model.layers)
    )


def _is_single(row: RowWork) -> bool:
    return bool(row.position) and row.num_tokens == 1 and row.adapter is None


def apart(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies a function of single numbers to rows, `[N, ...]`, so that no row changes another's bits."""
    flat = rows.reshape(len(rows), -1)
    width = flat.shape[1]
    if missing := -width % _WHOLE_VECTORS:
        flat = functional.pad(flat, (0, missing))
    flat, most = flat.contiguous(), max(1, _MAX_UNCUT // flat.shape[1])
    applied = function(flat) if len(flat) <= most else torch.cat([function(part) for part in torch.split(flat, most)])
    return applied.narrow(1, 0, width).reshape(rows.shape)


def multiplied(layer: nn.Module, rows: Tensor) -> Tensor:
    """The product of a linear layer with rows, `[N, in]`: `[N, out]` in the same dtype."""
    takes_all = isinstance(layer, PackedLinear) or getattr(layer, "panels", None) is not None
    if takes_all or len(rows) == 1:
        return cast(Tensor, layer(rows))
    return torch.cat([layer(row) for row in torch.split(rows, 1)])


@dataclass(frozen=True, slots=True)
class _Rows:
    """What all blocks of a call share.

    Attributes:
        rows: the rows, which have begun before; none in a probe of attention.
        batch: the rows, as attention takes them.
        turn: the cosines and signed sines of their positions, see `RotaryTable.rows`.
    """

    rows: Sequence[RowWork]
    batch: AttentionBatch
    turn: tuple[Tensor, Tensor]

    def states(self, layer: int) -> list[LayerState]:
        """Each row's state before the call."""
        return [row.cache.states.at(row.position)[layer] for row in self.rows if row.cache.states is not None]

    def keep(self, layer: int, states: Sequence[LayerState]) -> None:
        """Stores each row's state as computed, but not yet committed."""
        for row, state in zip(self.rows, states, strict=True):
            if row.cache.states is not None:
                row.cache.states.computed[layer] = state


class _Part(Protocol):
    """Attention, a recurrent state, or an MLP."""

    def forward(self, normed: Tensor, rows: _Rows) -> Tensor:
        """The part's output for normalised hidden states, `[N, H]`, in the same shape and dtype."""
        ...


class _Block:
    """One block: a norm, attention or a state, a sum; a norm, an MLP or a mixture, a sum."""

    def __init__(self, layer: Any, index: int) -> None:
        self._mixer_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        if _GatedDelta.fits(mixer := _mixer_of(layer)):
            self._mixer: _Part = _GatedDelta(mixer, index)
        else:
            self._mixer = _GatedAttention(mixer, index)
        self._mlp: _Part = _Mixture(layer.mlp) if _Mixture.fits(layer.mlp) else _GatedMlp(layer.mlp)

    @staticmethod
    def fits(layer: Any) -> bool:
        """The block has parts of the kinds in this module."""
        mixer = _mixer_of(layer)
        return (_GatedDelta.fits(mixer) or _GatedAttention.fits(mixer)) and (
            _Mixture.fits(layer.mlp) or _GatedMlp.fits(layer.mlp)
        )

    def forward(self, hidden: Tensor, rows: _Rows) -> Tensor:
        hidden = hidden + self._mixer.forward(self._mixer_norm(hidden), rows)
        return hidden + self._mlp.forward(self._mlp_norm(hidden), rows)


def _mixer_of(layer: Any) -> Any:
    return layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn


def _is_plain(module: nn.Module) -> bool:
    """A module's linear layers are dense or packed."""
    return not any(isinstance(each, nn.Linear) for each in module.children())


def _has_parts(module: nn.Module, names: set[str]) -> bool:
    """A module has exactly these parts, and its linear layers are dense or packed."""
    return {name for name, _ in module.named_children()} == names and _is_plain(module)


class _GatedDelta:
    """Linear attention by the gated delta rule, as in Qwen3-Next and Qwen3.5."""

    def __init__(self, module: Any, layer: int) -> None:
        self._module, self._layer = module, layer
        heads: int = module.num_v_heads
        # One function makes the rates, `sigmoid(b)`, and the decays, `exp(-e^A softplus(a + bias))`.
        self._signs = torch.cat([-torch.ones(heads), torch.ones(heads)])
        self._offsets = torch.cat([torch.zeros(heads), module.dt_bias.detach().float()])
        self._factors = torch.cat([-torch.ones(heads), -module.A_log.detach().float().exp()])
        self._weight = module.conv1d.weight.detach().squeeze(1).float()

    @staticmethod
    def fits(module: Any) -> bool:
        """The module is one of this kind, with sizes that the compiled function takes."""
        is_one = type(module).__name__.endswith("GatedDeltaNet") and _is_plain(module)
        return is_one and can_step(module.head_v_dim) and module.activation == "silu"

    def forward(self, normed: Tensor, rows: _Rows) -> Tensor:
        """See `_Part.forward`."""
        own, states = self._module, rows.states(self._layer)
        if not states:
            return torch.zeros_like(normed)
        mixed, gate, numbers = self._projected(normed)
        mixed, windows = convolved(mixed, states, self._weight, own.conv1d.bias)
        keys, value = torch.split(apart(functional.silu, mixed), [2 * own.key_dim, own.value_dim], dim=1)
        keys = keys.reshape(len(normed), 2 * own.num_k_heads, own.head_k_dim)
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + _EPSILON)
        query, key = torch.split(keys, own.num_k_heads, dim=1)
        summed = apart(functional.softplus, torch.addcmul(self._offsets, numbers.float(), self._signs))
        rate, decay = torch.split(apart(torch.exp, summed * self._factors), own.num_v_heads, dim=1)
        output, after = step_states(
            [_recurrent(state) for state in states], query, key,
            value.view(len(normed), own.num_v_heads, own.head_v_dim), decay, rate, scaling=own.head_k_dim**-0.5,
        )  # fmt: skip
        rows.keep(self._layer, [LayerState(*each) for each in zip(windows, after, strict=True)])
        output = _gated_norm(own.norm, output, gate.view(output.shape), normed.dtype)
        return multiplied(own.out_proj, output.flatten(1))

    def _projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[N, channels]`; gates, `[N, heads * value size]`; `b` and `a`, `[N, 2 heads]`."""
        own = self._module
        if not hasattr(own, "in_proj_qkvz"):
            mixed, gate, b, a = (
                multiplied(each, normed) for each in (own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a)
            )
            return mixed, gate, torch.cat((b, a), dim=1)
        projected = (multiplied(each, normed).unsqueeze(1) for each in (own.in_proj_qkvz, own.in_proj_ba))
        query, key, value, gate, b, a = (each.flatten(1) for each in own.fix_query_key_value_ordering(*projected))
        return torch.cat((query, key, value), dim=1), gate, torch.cat((b, a), dim=1)


def convolved(
    channels: Tensor, states: Sequence[LayerState], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """A short convolution over each row's newest inputs.

    Args:
        channels: `[N, channels]`, the new inputs.
        weight: float32 `[channels, kernel]`.
        bias: `[channels]` or None.

    Returns:
        float32 `[N, channels]`, and for each row the newest inputs, `[1, channels, kernel]` in their dtype.
    """
    held = [state.conv for state in states]
    before = held[0] if len(held) == 1 else torch.cat(held)
    window = torch.cat((before[..., 1:], channels.unsqueeze(-1)), dim=-1)
    output = (window * weight).sum(-1)
    if bias is not None:
        output = output + bias
    # What a session keeps holds no memory of the others.
    windows = [window] if len(held) == 1 else [each.clone() for each in torch.split(window, 1)]
    return output, windows


def _recurrent(state: LayerState) -> Tensor:
    if state.recurrent is None:
        raise ValueError("the layer keeps only the inputs of a convolution")
    return state.recurrent.float().contiguous()


def _gated_norm(norm: Any, output: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of `[N, heads, size]`, float32, times SiLU of the gate, `[N, heads, size]`; the result is in `dtype`."""
    output = output.to(dtype).float()
    scale = torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    normed: Tensor = norm.weight * (output * scale).to(dtype)
    return (normed * apart(functional.silu, gate.float())).to(dtype)


class _GatedAttention:
    """Attention whose output is multiplied by a gate, which the projection of queries makes, too."""

    def __init__(self, module: Any, layer: int) -> None:
        self._module, self._layer = module, layer

    @staticmethod
    def fits(module: Any) -> bool:
        """The module has the usual parts."""
        return _has_parts(module, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})

    def forward(self, normed: Tensor, rows: _Rows) -> Tensor:
        """See `_Part.forward`."""
        own, num_rows = self._module, len(normed)
        key, value = (multiplied(each, normed).view(num_rows, -1, own.head_dim) for each in (own.k_proj, own.v_proj))
        query, gate = multiplied(own.q_proj, normed).view(num_rows, -1, 2 * own.head_dim).chunk(2, dim=-1)
        heads = rotate_heads(torch.cat((own.q_norm(query), own.k_norm(key)), dim=1), *rows.turn, in_pairs=False)
        query, key = torch.split(heads, [query.shape[1], key.shape[1]], dim=1)
        attended = rows.batch.attend(self._layer, query, key, value, scaling=own.scaling)
        gated = attended.reshape(num_rows, -1) * apart(torch.sigmoid, gate.reshape(num_rows, -1))
        return multiplied(own.o_proj, gated)


class _GatedMlp:
    """A gate and two more projections."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @staticmethod
    def fits(module: Any) -> bool:
        """The module has the usual parts."""
        return _has_parts(module, {"gate_proj", "up_proj", "down_proj", "act_fn"})

    def forward(self, normed: Tensor, _rows: _Rows) -> Tensor:
        """See `_Part.forward`."""
        own = self._module
        gate, up = multiplied(own.gate_proj, normed), multiplied(own.up_proj, normed)
        return multiplied(own.down_proj, apart(own.act_fn, gate) * up)


class _Mixture:
    """A mixture of experts next to an MLP that all tokens share, which has a gate."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._shared = _GatedMlp(module.shared_expert)

    @staticmethod
    def fits(module: Any) -> bool:
        """The module has the usual parts."""
        return (
            _has_parts(module, {"gate", "experts", "shared_expert", "shared_expert_gate"})
            and _GatedMlp.fits(module.shared_expert)
            and (isinstance(module.experts, PackedExperts) or are_usual(module.experts))
        )

    def forward(self, normed: Tensor, rows: _Rows) -> Tensor:
        """See `_Part.forward`. Each pair of a token and an expert is multiplied by itself."""
        own, experts = self._module, self._module.experts
        tokens = torch.split(normed, 1)
        routed = [own.gate(token) for token in tokens]
        weights, ids = (torch.cat([each[part] for each in routed]) for part in (1, 2))
        chosen: list[list[int]] = ids.tolist()
        pairs = [(token, expert) for token, own_experts in zip(tokens, chosen, strict=True) for expert in own_experts]
        gate, up = torch.cat([_product(*pair, experts.gate_up_proj) for pair in pairs]).chunk(2, dim=-1)
        gated = torch.split(apart(experts.act_fn, gate) * up, 1)
        results = torch.cat(
            [_product(each, expert, experts.down_proj) for each, (_, expert) in zip(gated, pairs, strict=True)]
        )
        mixed = (results.view(len(tokens), -1, normed.shape[1]) * weights.unsqueeze(-1)).sum(1).to(normed.dtype)
        share = apart(torch.sigmoid, multiplied(own.shared_expert_gate, normed))
        return mixed + share * self._shared.forward(normed, rows)


def _product(row: Tensor, expert: int, weights: Tensor | PackedExpertWeights) -> Tensor:
    if isinstance(weights, PackedExpertWeights):
        return cast(Tensor, weights(expert, row))
    return functional.linear(row, weights[expert])
