"""The parts of blocks with recurrent states, for tokens of different sessions.

No number of a token depends on the other rows of a call. torch's operators do not keep that rule by themselves: on a
CPU a product rounds few tokens otherwise than many, and the last numbers of a tensor, which do not fill whole vectors,
get another function than those before. So weights in panels multiply all tokens together, other weights one piece after
the other (see `Rows`), and functions of single numbers see each token filled up to whole vectors (`whole_vectors`).
Sums and products of two numbers round in one way only. On a GPU, sums of many numbers do not keep the rule; kernels
compute them (`state_kernels`).

All tensors of a call are on one device; hidden states have the model's dtype, recurrent states float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.cache.states import LayerState
from corolla.compute.attention.base import AttentionBatch, PackedRow
from corolla.compute.attention.latents import attend_to_latents
from corolla.compute.base import RowWork
from corolla.compute.state_mixtures import Router
from corolla.kernels.recurrence_source import HeadSizes
from corolla.kernels.recurrences import is_whole, run_delta_rule, run_state_space
from corolla.models.fused import rotate_heads
from corolla.models.packed.modules import PackedExperts, PackedLinear
from corolla.models.rotary_table import Turn
from corolla.models.whole_vectors import apart

PIECE_TOKENS: Final = 64
"""A text is cut into pieces at the multiples of this number of tokens."""

# transformers adds this to the squared lengths of queries and keys.
_EPSILON: Final = 1e-6
# This layer's weights are read, so it stays plain.
_READ: Final = "kv_b_proj"
_UNLIMITED: Final = (0.0, float("inf"))


@dataclass(frozen=True, slots=True)
class Rows:
    """What all blocks of a call share, and how a CPU computes what needs more than one number of a token.

    Attributes:
        rows: the rows; none in a probe of attention.
        bounds: each row's first token, and the number of all tokens.
        batch: the pieces of all rows, as attention takes them: the runs of tokens between two multiples of
            `PIECE_TOKENS` of a text. Rows that are cut there have the same pieces in every call.
        turns: for each kind of layers with a rotary embedding, how queries and keys are turned; the kind is empty where
            all layers have the same one.
    """

    rows: Sequence[RowWork]
    bounds: Sequence[int]
    batch: AttentionBatch
    turns: Mapping[str, Turn]

    @classmethod
    def of(cls, rows: Sequence[RowWork], batch: AttentionBatch, turns: Mapping[str, Turn]) -> "Rows":
        """The rows of a batch.

        Args:
            turns: see `Rows`.
        """
        pieces = [piece for row in batch.rows for piece in _pieces(row)]
        if len(pieces) > len(rows):
            batch = AttentionBatch(batch.store, pieces, batch.backend)
        return cls(rows, [*accumulate((row.num_tokens for row in rows), initial=0)], batch, turns)

    @property
    def have_states(self) -> bool:
        """There are rows, so parts run their states; otherwise only attention runs."""
        return bool(self.rows)

    def norm(self, module: Any, tokens: Tensor) -> Tensor:
        """What a family's norm makes of the last dimension of tokens, `[..., size]`, in the same dtype."""
        return cast(Tensor, module(tokens))

    def product(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """The product of a linear layer with tokens, `[N, in]`: `[N, out]` in the same dtype."""
        takes_all = isinstance(layer, PackedLinear) or getattr(layer, "panels", None) is not None
        return cast(Tensor, layer(tokens)) if takes_all else self.by_piece(layer, tokens)

    def by_piece(self, function: Callable[..., Tensor], *tokens: Tensor) -> Tensor:
        """What a function makes of each piece, joined.

        Args:
            tokens: `[N, ...]` each.

        Returns:
            `[N, ...]`, as the function returns it.
        """
        lengths = [piece.num_tokens for piece in self.batch.rows]
        if len(lengths) <= 1:
            return function(*tokens)
        parts = zip(*(torch.split(each, lengths) for each in tokens), strict=True)
        return torch.cat([function(*each) for each in parts])

    def convolved(self, layer: int, convolution: "Convolution", channels: Tensor) -> Tensor:
        """Runs a part that only convolves over the tokens of all rows.

        Args:
            layer: the layer's index within the span.
            channels: `[N, channels]`.

        Returns:
            Float32 `[N, channels]`.
        """
        mixed, windows = convolution.run(channels, self.states(layer), self.bounds)
        self.keep(layer, [LayerState(each) for each in windows])
        return mixed

    def delta_rule(self, part: "Delta", channels: Tensor, gate: Tensor, rates: Tensor, decays: Tensor) -> Tensor:
        """Runs linear attention by a delta rule over the tokens of all rows.

        Args:
            channels: `[N, channels]`, queries, keys and values before their convolution.
            gate: `[N, heads * value size]`, the output's gate.
            rates: `[N, heads]`, see `Delta.rates_and_decays`.
            decays: `[N, heads]` or `[N, heads * key size]`, likewise.

        Returns:
            `[N, heads * value size]` in the dtype of `channels`, normalised and multiplied by the gate.
        """
        num_tokens, heads, states = len(channels), part.heads, self.states(part.layer)
        mixed, windows = part.convolution.run(channels, states, self.bounds)
        sizes = [2 * heads.num_key_heads * heads.key_size, heads.num_heads * heads.value_size]
        keys, value = torch.split(apart(functional.silu, mixed), sizes, dim=1)
        keys = keys.reshape(num_tokens, 2 * heads.num_key_heads, heads.key_size)
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + _EPSILON)
        query, key = torch.split(keys, heads.num_key_heads, dim=1)
        value = value.view(num_tokens, heads.num_heads, heads.value_size)
        rate, decay = part.rates_and_decays(rates, decays)
        none = torch.zeros(1, heads.num_heads, heads.key_size, heads.value_size, dtype=torch.float32)
        held = [_recurrent(state, none) for state in states]
        output, after = run_delta_rule(held, self.bounds, query, key, value, decay, rate, scaling=heads.key_size**-0.5)
        self.keep(part.layer, [LayerState(*each) for each in zip(windows, after, strict=True)])
        scale = torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + part.norm.variance_epsilon)
        activation = torch.sigmoid if part.norm.activation == "sigmoid" else functional.silu
        gated: Tensor = part.norm.weight * (output * scale) * apart(activation, gate.float()).view(output.shape)
        return gated.to(channels.dtype).flatten(1)

    def state_space(self, part: "StateSpace", channels: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        """Runs a state space over the tokens of all rows.

        Args:
            channels: `[N, channels]`, values, keys and queries before their convolution.
            gate: `[N, heads * value size]`, the output's gate.
            steps: `[N, heads]`, the lengths of time steps before softplus.

        Returns:
            `[N, heads * value size]` in the dtype of `channels`, normalised and multiplied by the gate.
        """
        num_tokens, heads, states = len(channels), part.heads, self.states(part.layer)
        mixed, windows = part.convolution.run(channels, states, self.bounds)
        keys = heads.num_key_heads * heads.key_size
        value, key, query = torch.split(
            apart(functional.silu, mixed), [heads.num_heads * heads.value_size, keys, keys], dim=1
        )
        key, query = (each.view(num_tokens, heads.num_key_heads, -1) for each in (key, query))
        lengths = apart(functional.softplus, steps.float() + part.offset)
        value = value.view(num_tokens, heads.num_heads, -1)
        none = torch.zeros(1, heads.num_heads, heads.value_size, heads.key_size, dtype=torch.float32)
        output, after = run_state_space(
            [_recurrent(state, none) for state in states],
            self.bounds, query, key, value * lengths.unsqueeze(-1), apart(torch.exp, lengths * part.factor),
        )  # fmt: skip
        self.keep(part.layer, [LayerState(*each) for each in zip(windows, after, strict=True)])
        output = (output + value * part.skip.unsqueeze(1)).flatten(1)
        return part.gated(output, apart(functional.silu, gate.float())).to(channels.dtype)

    def states(self, layer: int) -> list[LayerState | None]:
        """Each row's state before the call; None: the row begins."""
        return [
            row.cache.states.at(row.position)[layer] if row.position else None
            for row in self.rows
            if row.cache.states is not None
        ]

    def keep(self, layer: int, states: Sequence[LayerState]) -> None:
        """Stores each row's state as computed, but not yet committed."""
        shapes = self.batch.store.state_shapes
        if layer not in shapes and states:
            shapes[layer] = states[0].shape()
        for row, state in zip(self.rows, states, strict=True):
            if row.cache.states is not None:
                row.cache.states.computed[layer] = state


def _pieces(row: PackedRow) -> list[PackedRow]:
    end = row.position + row.num_tokens
    cuts = [row.position, *range(row.position - row.position % PIECE_TOKENS + PIECE_TOKENS, end, PIECE_TOKENS), end]
    shift = row.start - row.position
    return [PackedRow(row.cache, first, first + shift, last + shift) for first, last in pairwise(cuts)]


class Part(ABC):
    """Attention, a recurrent state, or an MLP.

    Args:
        module: the family's module, which `fits`.
        layer: the layer's index within the span.

    Attributes:
        layer: likewise.
    """

    def __init__(self, module: Any, layer: int) -> None:
        self._module, self.layer = module, layer

    @staticmethod
    @abstractmethod
    def fits(module: Any) -> bool:
        """The module computes what this class does."""

    @abstractmethod
    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """Runs the part over the new tokens of all rows.

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


def made_part(module: nn.Module, layer: int, kinds: Sequence[type[Part]]) -> Part:
    """A part of the first kind that a module fits. Raises ValueError if it fits none."""
    kind = part_of(module, kinds)
    if kind is None:
        raise ValueError(f"{type(module).__name__} computes what no part does")
    return kind(module, layer)


def _names(module: nn.Module) -> set[str]:
    """The names of a module's parts, without activations."""
    return {name for name, _ in module.named_children()} - {"act", "act_fn", "activation"}


class Delta(Part):
    """Linear attention by a delta rule.

    Args:
        heads: the sizes of states.
        norm: the norm of the output, which a gate multiplies.
        output: the projection of the output.
        offsets: float32 `[heads]` or `[heads * key size]`, and `factors`, float32 `[heads]`: a state is multiplied by
            `exp(factor * softplus(decay + offset))`.

    Attributes:
        heads: likewise, and so are `norm`, `offsets` and `factors`.
        convolution: the convolution of queries, keys and values.
        most_rate: the largest share of a value that replaces what the state held.
    """

    most_rate = 1.0

    def __init__(
        self, module: Any, layer: int, heads: HeadSizes, norm: Any, output: nn.Module, offsets: Tensor, factors: Tensor
    ) -> None:
        super().__init__(module, layer)
        self.heads, self.norm, self._output = heads, norm, output
        self.offsets, self.factors = offsets.detach().float(), factors.detach().float()
        self.convolution = Convolution(module.conv1d)

    @abstractmethod
    def _projected(self, normed: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `Rows.delta_rule` takes."""

    @abstractmethod
    def rates_and_decays(self, rates: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        """The rates and the decays that `run_delta_rule` takes, from the projections of tokens, on a CPU.

        Args:
            rates: `[N, heads]` in the model's dtype.
            decays: `[N, heads]`, or `[N, heads * key size]`, in the model's dtype.

        Returns:
            Float32 `[N, heads]`, and `[N, heads]` or `[N, heads, key size]`.
        """

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        if not rows.have_states:
            return torch.zeros_like(normed)
        return rows.product(self._output, rows.delta_rule(self, *self._projected(normed, rows)))


class _GatedDelta(Delta):
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

    def __init__(self, module: Any, layer: int) -> None:
        heads = HeadSizes(module.num_v_heads, module.num_k_heads, module.head_k_dim, module.head_v_dim)
        is_olmo = hasattr(module, "g_proj")
        norm, output = (module.o_norm, module.o_proj) if is_olmo else (module.norm, module.out_proj)
        super().__init__(module, layer, heads, norm, output, module.dt_bias, -module.A_log.detach().float().exp())
        self.most_rate = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        ones = torch.ones_like(self.factors)
        # One function makes the rates, `sigmoid(b)`, and the decays, `exp(-e^A softplus(a + bias))`.
        self._signs = torch.cat([-ones, ones])
        self._all_offsets = torch.cat([0 * ones, self.offsets])
        self._all_factors = torch.cat([-ones, self.factors])

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        names = _names(module) - {"conv1d", "norm", "out_proj", "o_norm", "o_proj"}
        inputs = (
            {"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"},
            {"q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"},
        )  # fmt: skip
        return names in inputs and hasattr(module, "conv1d") and is_whole(module.head_v_dim) and _is_silu(module)

    def _projected(self, normed: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = self._module
        if hasattr(own, "in_proj_qkvz"):
            projected = (rows.product(each, normed).unsqueeze(1) for each in (own.in_proj_qkvz, own.in_proj_ba))
            query, key, value, gate, b, a = (each.flatten(1) for each in own.fix_query_key_value_ordering(*projected))
            channels = torch.cat((query, key, value), dim=1)
        elif hasattr(own, "in_proj_qkv"):
            layers = (own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a)
            channels, gate, b, a = (rows.product(each, normed) for each in layers)
        else:
            channels = torch.cat([rows.product(each, normed) for each in (own.q_proj, own.k_proj, own.v_proj)], dim=1)
            gate, b, a = (rows.product(each, normed) for each in (own.g_proj, own.b_proj, own.a_proj))
        return channels, gate, b, a

    def rates_and_decays(self, rates: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        """See `Delta.rates_and_decays`."""
        numbers = torch.cat((rates, decays), dim=1).float()
        summed = apart(functional.softplus, torch.addcmul(self._all_offsets, numbers, self._signs))
        rate, decay = apart(torch.exp, summed * self._all_factors).chunk(2, dim=1)
        return rate * self.most_rate, decay


class _KimiDelta(Delta):
    """The delta rule of Kimi-Linear, in which each number of a key has a decay of its own."""

    def __init__(self, module: Any, layer: int) -> None:
        heads = HeadSizes(module.num_heads, module.num_heads, module.head_dim, module.head_dim)
        forgetting = module.forget_gate
        factors = -forgetting.A_log.detach().float().exp().flatten()
        super().__init__(module, layer, heads, module.o_norm, module.o_proj, forgetting.dt_bias.flatten(), factors)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        names = {"q_proj", "k_proj", "v_proj", "conv1d", "forget_gate", "b_proj", "g_a_proj", "g_b_proj", "o_norm"}
        return _names(module) == {*names, "o_proj"} and is_whole(module.head_dim) and _is_silu(module)

    def _projected(self, normed: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, forgetting, product = self._module, self._module.forget_gate, rows.product
        channels = torch.cat([product(each, normed) for each in (own.q_proj, own.k_proj, own.v_proj)], dim=1)
        gate = product(own.g_b_proj, product(own.g_a_proj, normed))
        forgotten = product(forgetting.f_b_proj, product(forgetting.f_a_proj, normed))
        return channels, gate, product(own.b_proj, normed), forgotten

    def rates_and_decays(self, rates: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
        """See `Delta.rates_and_decays`."""
        summed = apart(functional.softplus, decays.float() + self.offsets)
        summed = summed.view(len(decays), self.heads.num_heads, self.heads.key_size)
        return apart(torch.sigmoid, rates.float()), apart(torch.exp, summed * self.factors.unsqueeze(1))


class StateSpace(Part):
    """The state space of Mamba-2.

    Attributes:
        heads: the sizes of states.
        convolution: the convolution of values, keys and queries.
        offset: float32 `[heads]`, what is added to the lengths of time steps before softplus.
        factor: float32 `[heads]`: a state is multiplied by `exp(factor * length)`.
        skip: float32 `[heads]`, the factors of values that are added to the output.
        norm: the norm of the output.
        num_groups: how many groups of the output are normalised by themselves.
        gates_last: whether the gate multiplies what is normalised already.
    """

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.heads = HeadSizes(module.num_heads, module.n_groups, module.ssm_state_size, module.head_dim)
        self.convolution = Convolution(module.conv1d)
        self.offset, self.skip = (each.detach().float() for each in (module.dt_bias, module.D))
        self.factor = -module.A_log.detach().float().exp()
        self.norm, self.num_groups = module.norm, int(module.n_groups)
        self.gates_last = bool(getattr(module.norm, "norm_before_gate", False))
        # Falcon-H1 scales the inputs and outputs of the first product.
        self._input_scale: float = getattr(module, "ssm_in_multiplier", 1.0)
        scales: Tensor | None = getattr(module, "mup_vector", None)
        self._scales = None if scales is None else scales.view(1, -1)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        if _names(module) != {"conv1d", "in_proj", "norm", "out_proj"} or not hasattr(module, "ssm_state_size"):
            return False
        return (
            is_whole(module.ssm_state_size) and _is_silu(module) and tuple(module.time_step_limit or ()) == _UNLIMITED
        )

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own = self._module
        if not rows.have_states:
            return torch.zeros_like(normed)
        projected = rows.product(own.in_proj, scaled(normed, self._input_scale))
        if self._scales is not None:
            projected = projected * self._scales
        gate, channels, steps = torch.split(projected, [own.intermediate_size, own.conv_dim, own.num_heads], dim=1)
        return rows.product(own.out_proj, rows.state_space(self, channels, gate, steps).to(normed.dtype))

    def gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """The output, `[N, size]`, normalised in groups and multiplied by an activated gate, on a CPU."""
        norm = self.norm
        if isinstance(norm, nn.Identity):
            return output * gate
        grouped = (output if self.gates_last else output * gate).view(len(output), self.num_groups, -1)
        scale = torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        normed = norm.weight * (grouped * scale).flatten(1)
        return cast(Tensor, normed * gate if self.gates_last else normed)


class _ShortConvolution(Part):
    """The short convolution of LFM2 and LFM3, between two gates."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self._convolution = Convolution(module.conv)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        return _names(module) == {"conv", "in_proj", "out_proj"}

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own = self._module
        if not rows.have_states:
            return torch.zeros_like(normed)
        before, after, channels = rows.product(own.in_proj, normed).chunk(3, dim=1)
        mixed = rows.convolved(self.layer, self._convolution, before * channels)
        return rows.product(own.out_proj, after * mixed.to(normed.dtype))


class Convolution:
    """A short convolution over the newest inputs of each row.

    Args:
        module: the family's module.

    Attributes:
        weight: `[channels, kernel]` in the model's dtype.
        bias: `[channels]` in the model's dtype; None: there is none.
    """

    def __init__(self, module: nn.Conv1d) -> None:
        self.weight = module.weight.detach().squeeze(1)
        self.bias = None if module.bias is None else module.bias.detach()
        self._weight = self.weight.float().T.contiguous()
        self._bias = None if self.bias is None else self.bias.float()

    def run(
        self, channels: Tensor, states: Sequence[LayerState | None], bounds: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the convolution over the tokens of all rows, on a CPU.

        Args:
            channels: `[N, channels]`, the new inputs.
            states: each row's state, see `Rows.states`.
            bounds: see `Rows.bounds`.

        Returns:
            float32 `[N, channels]`, and for each row the newest inputs, `[1, channels, kernel]` in their dtype.
        """
        size = len(self._weight)
        lengths = [end - start for start, end in pairwise(bounds)]
        parts: list[Tensor] = []
        for state, part in zip(states, torch.split(channels, lengths), strict=True):
            parts.append(channels.new_zeros(size - 1, part.shape[1]) if state is None else state.conv[0, :, 1:].T)
            parts.append(part)
        joined = torch.cat(parts)
        numbers, num_outputs = joined.float(), len(joined) - size + 1
        output = numbers[:num_outputs] * self._weight[0]
        # A product and a sum by themselves: whether torch joins them depends on where the numbers lie.
        for tap in range(1, size):
            output += numbers[tap : tap + num_outputs] * self._weight[tap]
        if self._bias is not None:
            output += self._bias
        starts = [start + index * (size - 1) for index, start in enumerate(bounds[:-1])]
        if len(starts) > 1:
            output = torch.cat([output.narrow(0, *each) for each in zip(starts, lengths, strict=True)])
        # What a session keeps holds no memory of the others.
        windows = [
            joined.narrow(0, start + length - 1, size).T.clone(memory_format=torch.contiguous_format).unsqueeze(0)
            for start, length in zip(starts, lengths, strict=True)
        ]
        return output, windows


def _recurrent(state: LayerState | None, none: Tensor) -> Tensor:
    """The matrices of a state, float32; `none`: those of a row that begins."""
    if state is None:
        return none
    if state.recurrent is None:
        raise ValueError("the layer keeps only the inputs of a convolution")
    return state.recurrent.float().contiguous()


def scaled(tokens: Tensor, factor: float) -> Tensor:
    """Multiplies tokens by a factor, which most families do not have.

    Args:
        tokens: `[N, H]`.

    Returns:
        `[N, H]` in the same dtype.
    """
    return tokens if factor == 1.0 else tokens * factor


def _is_silu(module: Any) -> bool:
    return bool(module.activation == "silu")


class Attention(Part):
    """Attention. Heads may be normalised, and a gate may multiply the output.

    The gate comes from the projection of queries, which has a number for each of the output's, or from a projection
    with a number for each head.
    """

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        projections = {"q_proj", "k_proj", "v_proj"}
        others = ({"o_proj"}, {"q_norm", "k_norm", "o_proj"}, {"q_layernorm", "k_layernorm", "out_proj"})
        return any(_names(module) - {"g_proj"} == projections | each for each in others)

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own = self._module
        query, key, value = (rows.product(each, normed) for each in (own.q_proj, own.k_proj, own.v_proj))
        key = scaled(key, getattr(own, "key_multiplier", 1.0))
        query, key, value = (each.view(len(normed), -1, own.head_dim) for each in (query, key, value))
        gate: Tensor | None = None
        if query.shape[1] != own.config.num_attention_heads:
            query, gate = query.view(len(normed), -1, 2 * own.head_dim).chunk(2, dim=-1)
        norms = [getattr(own, f"{name}_norm", getattr(own, f"{name}_layernorm", None)) for name in "qk"]
        query, key = (_of_heads(norm, heads, rows) for norm, heads in zip(norms, (query, key), strict=True))
        turn = rows.turns.get(getattr(own, "layer_type", "")) or rows.turns.get("")
        if turn is not None:
            query, key = (rotate_heads(each, turn.cos, turn.sin, in_pairs=False) for each in (query, key))
        window = rows.batch.store.window_of(self.layer)
        attended = rows.batch.attend(self.layer, query, key, value, scaling=own.scaling, window=window)
        if getattr(own, "g_proj", None) is not None:
            gate = rows.product(own.g_proj, normed).unsqueeze(-1)
        if gate is not None:
            attended = attended * apart(torch.sigmoid, gate)
        output = own.o_proj if hasattr(own, "o_proj") else own.out_proj
        return rows.product(output, attended.reshape(len(normed), -1))


def _of_heads(norm: Any, heads: Tensor, rows: Rows) -> Tensor:
    """Heads `[N, heads, head_dim]`, normalised one by one or all together, or as they are."""
    if norm is None:
        return heads
    together = norm.weight.numel() != heads.shape[-1]
    return rows.norm(norm, heads.flatten(1)).view(heads.shape) if together else rows.norm(norm, heads)


class LatentAttention(Part):
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

    def queries(self, normed: Tensor, rows: Rows) -> Tensor:
        """The queries of tokens, `[N, heads * head_dim]`, before their rotation; `normed` is `[N, H]`."""
        own, product = self._module, rows.product
        if own.q_proj is not None:
            return product(own.q_proj, normed)
        return product(own.q_b_proj, rows.norm(own.q_a_layernorm, product(own.q_a_proj, normed)))

    def latents(self, normed: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The latents of tokens, `[N, latent size]`, and the further numbers of keys, `[N, rotated size]`.

        Args:
            normed: `[N, H]`.
        """
        own = self._module
        latents, keys = torch.split(
            rows.product(own.kv_a_proj_with_mqa, normed), [own.kv_lora_rank, own.qk_rope_head_dim], dim=1
        )
        return rows.norm(own.kv_a_layernorm, latents), keys

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own, query = self._module, self.queries(normed, rows)
        latents, keys = self.latents(normed, rows)
        rows.batch.write(self.layer, latents.unsqueeze(1), keys.unsqueeze(1))
        heads = query.view(len(normed), -1, own.qk_head_dim).transpose(0, 1).unsqueeze(0)
        attended = torch.cat([*attend_to_latents(own, heads, rows.batch.rows, rows.batch, own.scaling)], dim=1)
        return rows.product(own.o_proj, attended.reshape(len(normed), -1))


class Mlp(Part):
    """Two projections with an activation between them, which a third one may multiply."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        names = next(each for each in _MLP_NAMES if set(each[:-1]) - {""} == _names(module))
        parts: list[Any] = [getattr(module, name, None) for name in names[:-1]]
        self._gate, self._up, self._down = parts
        self._activation = getattr(module, names[-1], functional.silu)
        self._scale = getattr(module, "gate_multiplier", 1.0), getattr(module, "down_multiplier", 1.0)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        return any(set(each[:-1]) - {""} == _names(module) for each in _MLP_NAMES)

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        of_gate, of_output = self._scale
        up = rows.product(self._up, normed)
        if self._gate is not None:
            gated = apart(self._activation, scaled(rows.product(self._gate, normed), of_gate)) * up
        elif up.shape[1] != _num_inputs(self._down):
            gate, up = up.chunk(2, dim=1)
            gated = apart(self._activation, gate) * up
        else:
            gated = apart(self._activation, up)
        return scaled(rows.product(self._down, gated), of_output)


# The gate, the second projection, the last one, and the activation; a second projection may make both of its inputs.
_MLP_NAMES: Final = (
    ("gate_proj", "up_proj", "down_proj", "act_fn"), ("w1", "w3", "w2", ""), ("", "up_proj", "down_proj", "act_fn"),
    ("", "input_linear", "output_linear", "activation"),
)  # fmt: skip


def _num_inputs(layer: Any) -> int:
    return int(layer.in_features if isinstance(layer, PackedLinear) else layer.weight.shape[1])


class _Mixture(Part):
    """A mixture of experts. There may be an MLP that all tokens share, which may have a gate."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self._shared = next((Mlp(each, layer) for each in _shared_of(module)), None)
        bias = (module.expert_bias,) if getattr(module, "use_expert_bias", False) else ()
        self._router = Router(module.gate if hasattr(module, "gate") else module.router, bias)
        self._has_panels = isinstance(module.experts, PackedExperts) and module.experts.lie_in_panels
        latent = (getattr(module, f"fc{number}_latent_proj", None) for number in (1, 2))
        self._into, self._out_of = (None if isinstance(each, nn.Identity) else each for each in latent)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        names = _names(module)
        others = names - {"gate", "router", "experts", "fc1_latent_proj", "fc2_latent_proj"}
        if others not in (set(), {"shared_experts"}, {"shared_expert", "shared_expert_gate"}):
            return False
        return "experts" in names and bool(names & {"gate", "router"}) and all(map(Mlp.fits, _shared_of(module)))

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        weights, ids = self._router.choose(normed, rows.product)
        inputs = normed if self._into is None else rows.product(self._into, normed)
        if self._has_panels:
            mixed: Tensor = self._module.experts(inputs, ids, weights)
        else:
            mixed = rows.by_piece(self._module.experts, inputs, ids, weights.to(normed.dtype))
        if self._out_of is not None:
            mixed = rows.product(self._out_of, mixed)
        if self._shared is None:
            return mixed
        shared = self._shared.forward(normed, rows)
        if hasattr(self._module, "shared_expert_gate"):
            shared = apart(torch.sigmoid, rows.product(self._module.shared_expert_gate, normed)) * shared
        return mixed + shared


def _shared_of(module: nn.Module) -> list[nn.Module]:
    """The MLP that all tokens share, if there is one."""
    return [each for name, each in module.named_children() if name in ("shared_expert", "shared_experts")]


RECURRENT: Final[tuple[type[Part], ...]] = (_GatedDelta, _KimiDelta, StateSpace, _ShortConvolution)
"""The kinds of parts that keep states."""

KINDS: Final[tuple[type[Part], ...]] = (*RECURRENT, Attention, LatentAttention, _Mixture, Mlp)
"""The kinds of parts on a CPU."""
