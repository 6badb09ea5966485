"""What the kernels of recurrent states and latents compute, by its definition, so that steps run without a GPU.

It looks at the numbers in tensors with tensors only, so it may be recorded. Weights are copied before views of them are
made: the double of a GPU makes none of tensors from outside of the inference mode.
"""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.compute.base import PackedStep
from corolla.compute.state_kernels import KernelRows, StateKernels
from corolla.compute.state_parts import Rows
from corolla.kernels.recurrence_source import HeadSizes
from corolla.kernels.state_rows import StateRows
from corolla.models.rotary_table import Turn


class DefinedKernels(StateKernels):
    """Stands in for the kernels that only GPUs have."""

    def _rows(self, step: PackedStep, turns: Mapping[str, Turn]) -> Rows:
        return DefinedRows(step.rows, (), step.batch, turns, {}, step.states)


class DefinedRows(KernelRows):
    """Rows whose norms are the family's modules."""

    @property
    def kernels(self) -> SimpleNamespace:
        return SimpleNamespace(
            convolve=convolve, multiply_heads=multiply_heads, norm_gated=norm_gated, run_delta_rule=run_delta_rule,
            run_state_space=run_state_space,
        )  # fmt: skip

    def norm(self, module: nn.Module, tokens: Tensor) -> Tensor:
        normed: Tensor = module(tokens)
        return normed


class _Held:
    """The states of rows while tokens run through them; at the end they go to the rows' own slots."""

    def __init__(self, table: Tensor, rows: StateRows) -> None:
        self._table, self._rows = table, rows
        begins = (rows.sources < 0).view(-1, *(1,) * (table.dim() - 1))
        self._states = table.index_select(0, rows.sources.clamp(min=0)).masked_fill(begins, 0.0)

    def of(self, token: int) -> Tensor:
        """The state of a token's row, `[1, ...]`."""
        return self._states.index_select(0, self._rows.rows_of_tokens.narrow(0, token, 1))

    def change(self, token: int, state: Tensor) -> None:
        self._states.index_copy_(0, self._rows.rows_of_tokens.narrow(0, token, 1).long(), state)

    def store(self) -> None:
        self._table.index_copy_(0, self._rows.targets, self._states)


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: StateRows, *, has_activation: bool
) -> Tensor:
    held, outputs, weight = _Held(windows, rows), list[Tensor](), weight.clone()
    for token in range(len(inputs)):
        window = torch.cat((held.of(token)[:, :, 1:], inputs[token, None, :, None]), dim=2)
        held.change(token, window)
        output = (window.float() * weight.float()).sum(-1)
        outputs.append(output if bias is None else output + bias.float())
    held.store()
    mixed = torch.cat(outputs)
    return functional.silu(mixed) if has_activation else mixed


def run_delta_rule(
    mixed: Tensor,
    rates: Tensor,
    decays: Tensor,
    offsets: Tensor,
    factors: Tensor,
    states: Tensor,
    rows: StateRows,
    heads: HeadSizes,
    *,
    most_rate: float,
) -> Tensor:
    held, keys, factors = _Held(states, rows), heads.num_key_heads * heads.key_size, factors.clone()
    query, key, value = torch.split(mixed, [keys, keys, heads.num_heads * heads.value_size], dim=1)
    query, key = (_of_heads(each, heads, functools.partial(functional.normalize, dim=-1)) for each in (query, key))
    value = value.view(len(mixed), heads.num_heads, 1, -1)
    decay = (
        functional.softplus(decays.float() + offsets).view(len(mixed), heads.num_heads, -1) * factors[:, None]
    ).exp()
    rate = rates.float().sigmoid() * most_rate
    outputs: list[Tensor] = []
    for token in range(len(mixed)):
        state = held.of(token) * decay[token, None, :, :, None]
        change = (value[token] - (state[0] * key[token, :, :, None]).sum(1, keepdim=True)) * rate[token, :, None, None]
        state = state + key[token, :, :, None] * change
        held.change(token, state)
        outputs.append((state * query[token, None, :, :, None]).sum(2) * heads.key_size**-0.5)
    held.store()
    return torch.cat(outputs)


def run_state_space(
    mixed: Tensor,
    steps: Tensor,
    offsets: Tensor,
    factors: Tensor,
    skips: Tensor,
    states: Tensor,
    rows: StateRows,
    heads: HeadSizes,
) -> Tensor:
    held, keys, skips = _Held(states, rows), heads.num_key_heads * heads.key_size, skips.clone()
    value, key, query = torch.split(mixed, [heads.num_heads * heads.value_size, keys, keys], dim=1)
    key, query = (_of_heads(each, heads) for each in (key, query))
    value = value.view(len(mixed), heads.num_heads, -1)
    length = functional.softplus(steps.float() + offsets)
    outputs: list[Tensor] = []
    for token in range(len(mixed)):
        given = (value[token] * length[token, :, None])[:, :, None] * key[token, :, None, :]
        state = held.of(token) * (length[token] * factors).exp()[:, None, None] + given
        held.change(token, state)
        outputs.append((state * query[token, None, :, None, :]).sum(3) + value[token] * skips[:, None])
    held.store()
    return torch.cat(outputs)


def norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    *,
    activation: str = "silu",
    gates_first: bool = False,
) -> Tensor:
    opening = (functional.silu if activation == "silu" else torch.sigmoid)(gate.float()).view(x.shape)
    value = x.float() * opening if gates_first else x.float()
    value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + epsilon)
    value = value * (weight if len(weight) == x.shape[-1] else weight.clone().view(x.shape[1:])).float()
    return (value if gates_first else value * opening).flatten(1).to(dtype)


def multiply_heads(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    out[..., : weights.shape[1]] = torch.einsum("nhi,hoi->nho", rows, weights.clone())


def _of_heads(keys: Tensor, heads: HeadSizes, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Queries or keys of all heads, `[N, heads, key size]`."""
    by_head = keys.view(len(keys), heads.num_key_heads, heads.key_size)
    made = by_head if function is None else function(by_head)
    return made.repeat_interleave(heads.num_heads // heads.num_key_heads, dim=1)
