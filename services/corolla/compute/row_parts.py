"""The parts of blocks with recurrent states, for rows of one token each, of different sessions, on CPUs.

No number of a row depends on the other rows. torch's operators do not keep that rule by themselves: a product rounds
one row otherwise than several, and the last numbers of a tensor, which do not fill whole vectors, get another function
than those before. So weights in panels multiply all rows together, and other weights one row after the other, and
functions of single numbers see each row filled up to whole vectors (`apart`).

All tensors of a call are on the CPU; hidden states have the model's dtype, recurrent states float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.cache.states import LayerState
from corolla.compute.attention.base import AttentionBatch
from corolla.compute.attention.latents import attend_to_latents
from corolla.compute.base import RowWork
from corolla.kernels.delta_rule import can_step, step_states
from corolla.models.fused import rotate_heads
from corolla.models.packed.modules import PackedExperts, PackedExpertWeights, PackedLinear, are_usual

# Two vectors of the largest registers, in the smallest type: torch's loops take so many numbers in a round.
_WHOLE_VECTORS: Final = 64
# torch cuts larger tensors among threads, between any two numbers.
_MAX_UNCUT: Final = 1 << 15
# What transformers adds to the squared lengths of queries and keys.
_EPSILON: Final = 1e-6
# This layer's weights are read, so it stays plain.
_READ: Final = "kv_b_proj"


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
class Rows:
    """What all blocks of a call share.

    Attributes:
        rows: the rows, which have begun before; none in a probe of attention.
        batch: the rows, as attention takes them.
        turn: the cosines and signed sines of their positions, each `[N, 1, rotary size]`, see `RotaryTable.rows`; None:
            there are none.
    """

    rows: Sequence[RowWork]
    batch: AttentionBatch
    turn: tuple[Tensor, Tensor] | None

    def states(self, layer: int) -> list[LayerState]:
        """Each row's state before the call."""
        return [row.cache.states.at(row.position)[layer] for row in self.rows if row.cache.states is not None]

    def keep(self, layer: int, states: Sequence[LayerState]) -> None:
        """Stores each row's state as computed, but not yet committed."""
        for row, state in zip(self.rows, states, strict=True):
            if row.cache.states is not None:
                row.cache.states.computed[layer] = state


class Part(ABC):
    """Attention, a recurrent state, or an MLP.

    Args:
        module: the family's module, which `fits`.
        layer: the layer's index within the span.

    Attributes:
        rotates: whether `Rows.turn` has to be there.
    """

    rotates = False

    def __init__(self, module: Any, layer: int) -> None:
        self._module, self._layer = module, layer

    @staticmethod
    @abstractmethod
    def fits(module: Any) -> bool:
        """The module computes what this class does."""

    @abstractmethod
    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """Runs the part over one token of each row.

        Args:
            normed: `[N, H]`, normalised hidden states.
            rows: what all blocks of the call share.

        Returns:
            `[N, H]` in the same dtype.
        """


def part_of(module: nn.Module, kinds: Sequence[type[Part]]) -> type[Part] | None:
    """The first kind that a family's module fits, if its linear layers are dense or packed; None: it fits none."""
    named = module.named_modules()
    if any(isinstance(each, nn.Linear) and not name.endswith(_READ) for name, each in named):
        return None
    return next((kind for kind in kinds if kind.fits(module)), None)


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class _Delta(Part):
    """Linear attention by a delta rule.

    Args:
        sizes: how many keys and how many states a token has, and the sizes of a key and of a value.
        norm: the norm of the output, which a gate multiplies.
        output: the projection of the output.
    """

    def __init__(self, module: Any, layer: int, sizes: tuple[int, int, int, int], norm: Any, output: nn.Module) -> None:
        super().__init__(module, layer)
        self._sizes, self._norm, self._output = sizes, norm, output
        self._weight = module.conv1d.weight.detach().squeeze(1).float()

    @abstractmethod
    def _projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[N, channels]`; the gate of the output; rates and decays, see `step_states`."""

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        num_rows, states = len(normed), rows.states(self._layer)
        if not states:
            return torch.zeros_like(normed)
        num_key_heads, num_heads, key_size, value_size = self._sizes
        channels, gate, rate, decay = self._projected(normed)
        mixed, windows = _convolved(channels, states, self._weight, self._module.conv1d.bias)
        keys, value = torch.split(
            apart(functional.silu, mixed), [2 * num_key_heads * key_size, num_heads * value_size], dim=1
        )
        keys = keys.reshape(num_rows, 2 * num_key_heads, key_size)
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + _EPSILON)
        query, key = torch.split(keys, num_key_heads, dim=1)
        held = [_recurrent(state) for state in states]
        value = value.view(num_rows, num_heads, value_size)
        output, after = step_states(held, query, key, value, decay, rate, scaling=key_size**-0.5)
        rows.keep(self._layer, [LayerState(*each) for each in zip(windows, after, strict=True)])
        scale = torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self._norm.variance_epsilon)
        activation = torch.sigmoid if self._norm.activation == "sigmoid" else functional.silu
        gated = self._norm.weight * (output * scale) * apart(activation, gate.float()).view(output.shape)
        return multiplied(self._output, gated.to(normed.dtype).flatten(1))


class _GatedDelta(_Delta):
    """The gated delta rule of Qwen3-Next and Qwen3.5."""

    def __init__(self, module: Any, layer: int) -> None:
        sizes = (module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        super().__init__(module, layer, sizes, module.norm, module.out_proj)
        ones = torch.ones(module.num_v_heads)
        # One function makes the rates, `sigmoid(b)`, and the decays, `exp(-e^A softplus(a + bias))`.
        self._signs = torch.cat([-ones, ones])
        self._offsets = torch.cat([0 * ones, module.dt_bias.detach().float()])
        self._factors = torch.cat([-ones, -module.A_log.detach().float().exp()])

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        inputs = _names(module) - {"conv1d", "norm", "out_proj"}
        if inputs not in ({"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}):
            return False
        return can_step(module.head_v_dim) and module.activation == "silu"

    def _projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = self._module
        if hasattr(own, "in_proj_qkvz"):
            projected = (multiplied(each, normed).unsqueeze(1) for each in (own.in_proj_qkvz, own.in_proj_ba))
            query, key, value, gate, b, a = (each.flatten(1) for each in own.fix_query_key_value_ordering(*projected))
            channels = torch.cat((query, key, value), dim=1)
        else:
            channels, gate, b, a = (
                multiplied(each, normed) for each in (own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a)
            )
        numbers = torch.cat((b, a), dim=1).float()
        summed = apart(functional.softplus, torch.addcmul(self._offsets, numbers, self._signs))
        rate, decay = apart(torch.exp, summed * self._factors).chunk(2, dim=1)
        return channels, gate, rate, decay


class _KimiDelta(_Delta):
    """The delta rule of Kimi-Linear, in which each number of a key has a decay of its own."""

    def __init__(self, module: Any, layer: int) -> None:
        sizes = (module.num_heads, module.num_heads, module.head_dim, module.head_dim)
        super().__init__(module, layer, sizes, module.o_norm, module.o_proj)
        forgetting = module.forget_gate
        self._offset = forgetting.dt_bias.detach().float()
        self._factor = -forgetting.A_log.detach().float().exp().view(-1, 1)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        names = {"q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm"}
        return _names(module) == {*names, "o_proj"} and can_step(module.head_dim) and module.activation == "silu"

    def _projected(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, forgetting = self._module, self._module.forget_gate
        channels = torch.cat([multiplied(each, normed) for each in (own.q_proj, own.k_proj, own.v_proj)], dim=1)
        gate = multiplied(own.g_b_proj, multiplied(own.g_a_proj, normed))
        rate = apart(torch.sigmoid, multiplied(own.b_proj, normed).float())
        forgotten = multiplied(forgetting.f_b_proj, multiplied(forgetting.f_a_proj, normed)).float() + self._offset
        summed = apart(functional.softplus, forgotten).view(len(normed), own.num_heads, own.head_dim)
        return channels, gate, rate, apart(torch.exp, summed * self._factor)


class _ShortConvolution(Part):
    """The short convolution of LFM2, between two gates."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self._weight = module.conv.weight.detach().squeeze(1).float()

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        return _names(module) == {"conv", "in_proj", "out_proj"}

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own, states = self._module, rows.states(self._layer)
        if not states:
            return torch.zeros_like(normed)
        before, after, channels = multiplied(own.in_proj, normed).chunk(3, dim=1)
        mixed, windows = _convolved(before * channels, states, self._weight, own.conv.bias)
        rows.keep(self._layer, [LayerState(each) for each in windows])
        return multiplied(own.out_proj, after * mixed.to(normed.dtype))


def _convolved(
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


class _Attention(Part):
    """Attention with normalised heads. A gate may multiply its output, which the projection of queries makes, too."""

    rotates = True

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        norms, projections = {"q_norm", "k_norm", "o_proj"}, {"q_proj", "k_proj", "v_proj"}
        others = {"q_layernorm", "k_layernorm", "out_proj"}
        return _names(module) in (projections | norms, projections | others)

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own, num_rows = self._module, len(normed)
        query, key, value = (
            multiplied(each, normed).view(num_rows, -1, own.head_dim) for each in (own.q_proj, own.k_proj, own.v_proj)
        )
        gate: Tensor | None = None
        if query.shape[1] != own.config.num_attention_heads:
            query, gate = query.view(num_rows, -1, 2 * own.head_dim).chunk(2, dim=-1)
        if hasattr(own, "q_norm"):
            query, key, output = own.q_norm(query), own.k_norm(key), own.o_proj
        else:
            query, key, output = own.q_layernorm(query), own.k_layernorm(key), own.out_proj
        turn = cast(tuple[Tensor, Tensor], rows.turn)
        query, key = (rotate_heads(each, *turn, in_pairs=False) for each in (query, key))
        attended = rows.batch.attend(self._layer, query, key, value, scaling=own.scaling).reshape(num_rows, -1)
        if gate is not None:
            attended = attended * apart(torch.sigmoid, gate.reshape(num_rows, -1))
        return multiplied(output, attended)


class _LatentAttention(Part):
    """Multi-latent attention without a rotary embedding, as in Kimi-Linear, on the latents themselves."""

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        names = _names(module) - {"q_proj"}
        queries = {"q_a_proj", "q_a_layernorm", "q_b_proj"} & names
        return len(queries) in (0, 3) and names == {
            *queries,
            "kv_a_proj_with_mqa",
            "kv_a_layernorm",
            "kv_b_proj",
            "o_proj",
        }

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own = self._module
        if own.q_proj is not None:
            query = multiplied(own.q_proj, normed)
        else:
            query = multiplied(own.q_b_proj, own.q_a_layernorm(multiplied(own.q_a_proj, normed)))
        latents, keys = torch.split(
            multiplied(own.kv_a_proj_with_mqa, normed), [own.kv_lora_rank, own.qk_rope_head_dim], dim=1
        )
        rows.batch.write(self._layer, own.kv_a_layernorm(latents).unsqueeze(1), keys.unsqueeze(1))
        heads = query.view(len(normed), -1, own.qk_head_dim).transpose(0, 1).unsqueeze(0)
        attended = torch.cat([*attend_to_latents(own, heads, rows.batch.rows, rows.batch, own.scaling)], dim=1)
        return multiplied(own.o_proj, attended.reshape(len(normed), -1))


class _GatedMlp(Part):
    """A gate and two more projections."""

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        return _names(module) in ({"gate_proj", "up_proj", "down_proj", "act_fn"}, {"w1", "w2", "w3"})

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own = self._module
        if hasattr(own, "w1"):
            gate, up, down, activation = own.w1, own.w3, own.w2, functional.silu
        else:
            gate, up, down, activation = own.gate_proj, own.up_proj, own.down_proj, own.act_fn
        gated = apart(activation, multiplied(gate, normed)) * multiplied(up, normed)
        return multiplied(down, gated)


class _Mixture(Part):
    """A mixture of experts. There may be an MLP that all tokens share, which may have a gate."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self._shared = next((_GatedMlp(each, layer) for each in _shared_of(module)), None)
        self._of_router = (module.expert_bias,) if getattr(module, "use_expert_bias", False) else ()

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        others = _names(module) - {"gate", "experts"}
        if others not in (set(), {"shared_experts"}, {"shared_expert", "shared_expert_gate"}):
            return False
        if not hasattr(module, "experts") or not all(map(_GatedMlp.fits, _shared_of(module))):
            return False
        return isinstance(module.experts, PackedExperts) or are_usual(module.experts)

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own, experts = self._module, self._module.experts
        routed = [own.gate(token, *self._of_router) for token in torch.split(normed, 1)]
        weights, ids = (torch.cat([each[part] for each in routed]) for part in (1, 2))
        chosen: list[int] = ids.flatten().tolist()
        # The pairs of a token and an expert, expert after expert.
        order = sorted(range(len(chosen)), key=chosen.__getitem__)
        groups = [(expert, len([*own_pairs])) for expert, own_pairs in groupby(chosen[pair] for pair in order)]
        pairs = torch.tensor(order)
        gate, up = _of_experts(normed[pairs // ids.shape[1]], groups, experts.gate_up_proj).chunk(2, dim=-1)
        results = torch.empty(len(order), normed.shape[1], dtype=normed.dtype)
        results[pairs] = _of_experts(apart(experts.act_fn, gate) * up, groups, experts.down_proj)
        mixed = (results.view(len(normed), -1, normed.shape[1]) * weights.unsqueeze(-1)).sum(1).to(normed.dtype)
        if self._shared is None:
            return mixed
        shared = self._shared.forward(normed, rows)
        if hasattr(own, "shared_expert_gate"):
            shared = apart(torch.sigmoid, multiplied(own.shared_expert_gate, normed)) * shared
        return mixed + shared


def _shared_of(module: nn.Module) -> list[nn.Module]:
    """The MLP that all tokens share, if there is one."""
    return [each for name, each in module.named_children() if name in ("shared_expert", "shared_experts")]


def _of_experts(rows: Tensor, groups: Sequence[tuple[int, int]], weights: Tensor | PackedExpertWeights) -> Tensor:
    """The products of rows, of which so many neighbours belong to each expert."""
    if isinstance(weights, PackedExpertWeights):
        parts = zip(groups, torch.split(rows, [count for _, count in groups]), strict=True)
        return torch.cat([weights(expert, part) for (expert, _), part in parts])
    experts = [expert for expert, count in groups for _ in range(count)]
    return torch.cat(
        [functional.linear(row, weights[each]) for row, each in zip(torch.split(rows, 1), experts, strict=True)]
    )


MIXERS: Final = (_GatedDelta, _KimiDelta, _ShortConvolution, _Attention, _LatentAttention)
"""The kinds of attention and of recurrent states."""
MLPS: Final = (_Mixture, _GatedMlp)
"""The kinds of what follows them in a block."""
