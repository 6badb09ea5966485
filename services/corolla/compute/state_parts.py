"""The parts of blocks with recurrent states, for tokens of different sessions, on CPUs.

No number of a token depends on the other rows of a call. torch's operators do not keep that rule by themselves: a
product rounds few tokens otherwise than many, and the last numbers of a tensor, which do not fill whole vectors, get
another function than those before. So weights in panels multiply all tokens together, other weights one piece after the
other (see `Rows`), and functions of single numbers see each token filled up to whole vectors (`whole_vectors`). Sums
and products of two numbers round in one way only.

All tensors of a call are on the CPU; hidden states have the model's dtype, recurrent states float32.
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
    """What all blocks of a call share.

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
    """

    def __init__(self, module: Any, layer: int) -> None:
        self._module, self._layer = module, layer

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


def part_of(module: nn.Module) -> type[Part] | None:
    """The first kind that a family's module fits, if its linear layers are dense or packed; None: it fits none."""
    named = module.named_modules()
    if any(isinstance(each, nn.Linear) and not name.endswith(_READ) for name, each in named):
        return None
    return next((kind for kind in _KINDS if kind.fits(module)), None)


def made_part(module: nn.Module, layer: int) -> Part:
    """A part of the kind that a module fits. Raises ValueError if it fits none."""
    kind = part_of(module)
    if kind is None:
        raise ValueError(f"{type(module).__name__} computes what no part does")
    return kind(module, layer)


def _names(module: nn.Module) -> set[str]:
    """The names of a module's parts, without activations."""
    return {name for name, _ in module.named_children()} - {"act", "act_fn", "activation"}


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
        self._convolution = _Convolution(module.conv1d)
        _, num_heads, key_size, value_size = sizes
        self._none = torch.zeros(1, num_heads, key_size, value_size)

    @abstractmethod
    def _projected(self, normed: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[N, channels]`; the output's gate; rates and decays, see `run_delta_rule`."""

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        states = rows.states(self._layer)
        if not states:
            return torch.zeros_like(normed)
        num_key_heads, num_heads, key_size, value_size = self._sizes
        channels, gate, rate, decay = self._projected(normed, rows)
        mixed, windows = self._convolution.run(channels, states, rows.bounds)
        keys, value = torch.split(
            apart(functional.silu, mixed), [2 * num_key_heads * key_size, num_heads * value_size], dim=1
        )
        keys = keys.reshape(len(normed), 2 * num_key_heads, key_size)
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + _EPSILON)
        query, key = torch.split(keys, num_key_heads, dim=1)
        value = value.view(len(normed), num_heads, value_size)
        held = [_recurrent(state, self._none) for state in states]
        output, after = run_delta_rule(held, rows.bounds, query, key, value, decay, rate, scaling=key_size**-0.5)
        rows.keep(self._layer, [LayerState(*each) for each in zip(windows, after, strict=True)])
        scale = torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self._norm.variance_epsilon)
        activation = torch.sigmoid if self._norm.activation == "sigmoid" else functional.silu
        gated = self._norm.weight * (output * scale) * apart(activation, gate.float()).view(output.shape)
        return rows.product(self._output, gated.to(normed.dtype).flatten(1))


class _GatedDelta(_Delta):
    """The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

    def __init__(self, module: Any, layer: int) -> None:
        sizes = (module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        is_olmo = hasattr(module, "g_proj")
        norm, output = (module.o_norm, module.o_proj) if is_olmo else (module.norm, module.out_proj)
        super().__init__(module, layer, sizes, norm, output)
        self._most_rate = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        ones = torch.ones(module.num_v_heads)
        # One function makes the rates, `sigmoid(b)`, and the decays, `exp(-e^A softplus(a + bias))`.
        self._signs = torch.cat([-ones, ones])
        self._offsets = torch.cat([0 * ones, module.dt_bias.detach().float()])
        self._factors = torch.cat([-ones, -module.A_log.detach().float().exp()])

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
        numbers = torch.cat((b, a), dim=1).float()
        summed = apart(functional.softplus, torch.addcmul(self._offsets, numbers, self._signs))
        rate, decay = apart(torch.exp, summed * self._factors).chunk(2, dim=1)
        return channels, gate, rate * self._most_rate, decay


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
        return _names(module) == {*names, "o_proj"} and is_whole(module.head_dim) and _is_silu(module)

    def _projected(self, normed: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own, forgetting, product = self._module, self._module.forget_gate, rows.product
        channels = torch.cat([product(each, normed) for each in (own.q_proj, own.k_proj, own.v_proj)], dim=1)
        gate = product(own.g_b_proj, product(own.g_a_proj, normed))
        rate = apart(torch.sigmoid, product(own.b_proj, normed).float())
        forgotten = product(forgetting.f_b_proj, product(forgetting.f_a_proj, normed)).float() + self._offset
        summed = apart(functional.softplus, forgotten).view(len(normed), own.num_heads, own.head_dim)
        return channels, gate, rate, apart(torch.exp, summed * self._factor)


class _StateSpace(Part):
    """The state space of Mamba-2."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self._convolution = _Convolution(module.conv1d)
        self._offset = module.dt_bias.detach().float()
        self._factor = -module.A_log.detach().float().exp()
        self._skip = module.D.detach().float().unsqueeze(1)
        # Falcon-H1 scales the inputs and outputs of the first product.
        self._input_scale: float = getattr(module, "ssm_in_multiplier", 1.0)
        self._scales: Tensor | None = getattr(module, "mup_vector", None)
        self._none = torch.zeros(1, module.num_heads, module.head_dim, module.ssm_state_size)

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
        own, states = self._module, rows.states(self._layer)
        if not states:
            return torch.zeros_like(normed)
        num_tokens, keys = len(normed), own.n_groups * own.ssm_state_size
        projected = rows.product(own.in_proj, scaled(normed, self._input_scale))
        if self._scales is not None:
            projected = projected * self._scales.view(1, -1)
        gate, channels, steps = torch.split(projected, [own.intermediate_size, own.conv_dim, own.num_heads], dim=1)
        mixed, windows = self._convolution.run(channels, states, rows.bounds)
        value, key, query = torch.split(apart(functional.silu, mixed), [own.intermediate_size, keys, keys], dim=1)
        key, query = (each.view(num_tokens, own.n_groups, -1) for each in (key, query))
        lengths = apart(functional.softplus, steps.float() + self._offset)
        value = value.view(num_tokens, own.num_heads, -1)
        output, after = run_state_space(
            [_recurrent(state, self._none) for state in states],
            rows.bounds, query, key, value * lengths.unsqueeze(-1), apart(torch.exp, lengths * self._factor),
        )  # fmt: skip
        rows.keep(self._layer, [LayerState(*each) for each in zip(windows, after, strict=True)])
        gated = self._gated((output + value * self._skip).flatten(1), apart(functional.silu, gate.float()))
        return rows.product(own.out_proj, gated.to(normed.dtype))

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """The output, normalised in groups and multiplied by its gate, before or afterwards."""
        norm = self._module.norm
        if isinstance(norm, nn.Identity):
            return output * gate
        gates_last = getattr(norm, "norm_before_gate", False)
        grouped = (output if gates_last else output * gate).view(len(output), self._module.n_groups, -1)
        scale = torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        normed = norm.weight * (grouped * scale).flatten(1)
        return cast(Tensor, normed * gate if gates_last else normed)


class _ShortConvolution(Part):
    """The short convolution of LFM2 and LFM3, between two gates."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self._convolution = _Convolution(module.conv)

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        return _names(module) == {"conv", "in_proj", "out_proj"}

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        own, states = self._module, rows.states(self._layer)
        if not states:
            return torch.zeros_like(normed)
        before, after, channels = rows.product(own.in_proj, normed).chunk(3, dim=1)
        mixed, windows = self._convolution.run(before * channels, states, rows.bounds)
        rows.keep(self._layer, [LayerState(each) for each in windows])
        return rows.product(own.out_proj, after * mixed.to(normed.dtype))


class _Convolution:
    """A short convolution over the newest inputs of each row.

    Args:
        module: the family's module.
    """

    def __init__(self, module: nn.Conv1d) -> None:
        self._weight = module.weight.detach().squeeze(1).float().T.contiguous()
        self._bias = None if module.bias is None else module.bias.detach().float()

    def run(
        self, channels: Tensor, states: Sequence[LayerState | None], bounds: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs the convolution over the tokens of all rows.

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


class _Attention(Part):
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
        query, key = (_of_heads(norm, heads) for norm, heads in zip(norms, (query, key), strict=True))
        turn = rows.turns.get(getattr(own, "layer_type", "")) or rows.turns.get("")
        if turn is not None:
            query, key = (rotate_heads(each, turn.cos, turn.sin, in_pairs=False) for each in (query, key))
        window = rows.batch.store.window_of(self._layer)
        attended = rows.batch.attend(self._layer, query, key, value, scaling=own.scaling, window=window)
        if getattr(own, "g_proj", None) is not None:
            gate = rows.product(own.g_proj, normed).unsqueeze(-1)
        if gate is not None:
            attended = attended * apart(torch.sigmoid, gate)
        output = own.o_proj if hasattr(own, "o_proj") else own.out_proj
        return rows.product(output, attended.reshape(len(normed), -1))


def _of_heads(norm: Any, heads: Tensor) -> Tensor:
    """Heads `[N, heads, head_dim]`, normalised one by one or all together, or as they are."""
    if norm is None:
        return heads
    together = norm.weight.numel() != heads.shape[-1]
    return cast(Tensor, norm(heads.flatten(1)).view(heads.shape) if together else norm(heads))


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
        own, product = self._module, rows.product
        if own.q_proj is not None:
            query = product(own.q_proj, normed)
        else:
            query = product(own.q_b_proj, own.q_a_layernorm(product(own.q_a_proj, normed)))
        latents, keys = torch.split(
            product(own.kv_a_proj_with_mqa, normed), [own.kv_lora_rank, own.qk_rope_head_dim], dim=1
        )
        rows.batch.write(self._layer, own.kv_a_layernorm(latents).unsqueeze(1), keys.unsqueeze(1))
        heads = query.view(len(normed), -1, own.qk_head_dim).transpose(0, 1).unsqueeze(0)
        attended = torch.cat([*attend_to_latents(own, heads, rows.batch.rows, rows.batch, own.scaling)], dim=1)
        return product(own.o_proj, attended.reshape(len(normed), -1))


class _Mlp(Part):
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
        self._shared = next((_Mlp(each, layer) for each in _shared_of(module)), None)
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
        return "experts" in names and bool(names & {"gate", "router"}) and all(map(_Mlp.fits, _shared_of(module)))

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


_KINDS: Final = (_GatedDelta, _KimiDelta, _StateSpace, _ShortConvolution, _Attention, _LatentAttention, _Mixture, _Mlp)
