"""Runs the kernels of recurrent states and of latents on tensors, which are on one device.

Functions of states return a new tensor on that device, and change nothing but the states in slots that rows write.
States are float32, `[slots, ...]`. Of the tensors of tokens, each token's numbers lie one after the other.
"""

import functools
from typing import Any, Final

import torch
from torch import Tensor

from corolla.kernels.recurrence_source import HeadSizes
from corolla.kernels.state_rows import StateRows
from corolla.kernels.triton import state_code
from corolla.kernels.triton.launches import LEAST_SIDE, launch, power_of_two, precision, tile_of
from corolla.kernels.triton.variants import Grid, Variant, variant

_EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}
# Channels of a token that a program convolves.
_CHANNELS: Final = 256
# Numbers of a head's state that a program holds in registers: many programs share the reading of a step's states.
_STATE_NUMBERS: Final = 4096
# transformers adds this to the squared lengths of queries and keys.
_EPSILON: Final = 1e-6


def _part(heads: HeadSizes) -> int:
    """How many of a value's numbers a program takes, a power of two."""
    return min(power_of_two(heads.value_size), max(1, _STATE_NUMBERS // power_of_two(heads.key_size)))


def _grid(heads: HeadSizes, rows: StateRows) -> Grid:
    return -(-heads.value_size // _part(heads)), heads.num_heads, len(rows.sources)


def _constants(heads: HeadSizes) -> dict[str, Any]:
    return {
        "NUM_HEADS": heads.num_heads, "NUM_KEY_HEADS": heads.num_key_heads, "KEY": heads.key_size,
        "KEY_BLOCK": power_of_two(heads.key_size), "VALUE": heads.value_size, "num_warps": 4, **_EXACT,
    }  # fmt: skip


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: StateRows, *, has_activation: bool
) -> Tensor:
    """A short convolution over the newest inputs of each row.

    Args:
        inputs: `[N, channels]` in the model's dtype.
        weight: `[channels, kernel]` in any dtype, contiguous.
        bias: `[channels]` in any dtype; None: there is none.
        windows: `[slots, channels, kernel]` in the model's dtype, the newest inputs of sessions.
        rows: the rows.
        has_activation: whether SiLU follows.

    Returns:
        Float32 `[N, channels]`.
    """
    num_tokens, channels = inputs.shape
    out = torch.empty(num_tokens, channels, dtype=torch.float32, device=inputs.device)
    block = min(_CHANNELS, power_of_two(channels))
    convolution = variant(
        state_code.convolve, KERNEL=weight.shape[1], HAS_BIAS=bias is not None, HAS_ACTIVATION=has_activation,
        BLOCK=block, num_warps=4, **_EXACT,
    )  # fmt: skip
    launch(
        convolution, (num_tokens, -(-channels // block)), inputs, weight, weight if bias is None else bias, windows,
        out, rows.rows_of_tokens, rows.first_tokens, rows.sources, rows.targets, inputs.stride(0), channels,
    )  # fmt: skip
    return out


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
    """Runs each row's tokens through its states by the gated delta rule.

    A state is multiplied by `exp(factor * softplus(decay + offset))`; then the share `most_rate * sigmoid(rate)` of the
    value replaces what it held for the key.

    Args:
        mixed: float32 `[N, 2 * key heads * key size + heads * value size]`: queries, keys and values. The kernel
            normalises queries and keys.
        rates: `[N, heads]` in any dtype.
        decays: `[N, heads]`, or `[N, heads * key size]`, in any dtype.
        offsets: float32 `[heads]`, or `[heads * key size]`.
        factors: float32 `[heads]`.
        states: `[slots, heads, key size, value size]`.
        rows: the rows.
        heads: the sizes.
        most_rate: the largest rate.

    Returns:
        Float32 `[N, heads, value size]`.
    """
    out = torch.empty(len(mixed), heads.num_heads, heads.value_size, dtype=torch.float32, device=mixed.device)
    launch(
        _delta_rule(heads, len(offsets) != heads.num_heads), _grid(heads, rows), mixed, rates, decays, offsets,
        factors, states, out, rows.first_tokens, rows.sources, rows.targets, rates.stride(0), decays.stride(0),
        heads.key_size**-0.5, most_rate, _EPSILON,
    )  # fmt: skip
    return out


@functools.cache
def _delta_rule(heads: HeadSizes, is_wide: bool) -> Variant:
    return variant(state_code.run_delta_rule, COLUMNS=_part(heads), IS_WIDE=is_wide, **_constants(heads))


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
    """Runs each row's tokens through its states by the state space of Mamba-2.

    The length of a token's time step is `softplus(step + offset)`.

    Args:
        mixed: float32 `[N, heads * value size + 2 * key heads * key size]`: values, keys and queries.
        steps: `[N, heads]` in any dtype.
        offsets: float32 `[heads]`.
        factors: float32 `[heads]`: a state is multiplied by `exp(factor * length)`.
        skips: float32 `[heads]`: the factors of values that are added to the output.
        states: `[slots, heads, value size, key size]`.
        rows: the rows.
        heads: the sizes.

    Returns:
        Float32 `[N, heads, value size]`.
    """
    out = torch.empty(len(mixed), heads.num_heads, heads.value_size, dtype=torch.float32, device=mixed.device)
    launch(
        _state_space(heads), _grid(heads, rows), mixed, steps, offsets, factors, skips, states, out, rows.first_tokens,
        rows.sources, rows.targets, steps.stride(0),
    )  # fmt: skip
    return out


@functools.cache
def _state_space(heads: HeadSizes) -> Variant:
    return variant(state_code.run_state_space, ROWS=_part(heads), **_constants(heads))


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
    """Divides each group of numbers by the root of its mean square, times the activation of a gate.

    Args:
        x: `[N, groups, size]` in any dtype, contiguous.
        gate: `[N, groups * size]` in any dtype.
        weight: `[size]`, which all groups share, or `[groups * size]`.
        epsilon: added to the mean of the squares.
        dtype: the dtype of the result.
        activation: `silu` or `sigmoid`.
        gates_first: whether the gate multiplies what is normalised, and not the result.

    Returns:
        `[N, groups * size]` in `dtype`.
    """
    num_tokens, num_groups, size = x.shape
    out = torch.empty(num_tokens, num_groups * size, dtype=dtype, device=x.device)
    block = power_of_two(size)
    norm = variant(
        state_code.norm_gated, NUM_GROUPS=num_groups, SIZE=size, BLOCK=block, ACTIVATION=activation,
        GATES_FIRST=gates_first, SHARES_WEIGHT=len(weight) == size, num_warps=min(8, max(1, block // 256)), **_EXACT,
    )  # fmt: skip
    launch(norm, (num_tokens, num_groups), x, gate, weight, out, epsilon, gate.stride(0))
    return out


def multiply_heads(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """Multiplies the numbers of each head by a weight of its own, so that no row depends on the others.

    Args:
        rows: `[N, heads, in]`; a head's numbers lie one after the other.
        weights: `[heads, out, in]` in the same dtype, of any strides.
        out: `[N, heads, out or more]` in the same dtype, whose first numbers of each head are written; a head's
            numbers lie one after the other.
    """
    num_rows, num_heads, num_inputs = rows.shape
    num_outputs = weights.shape[1]
    tile = tile_of(num_rows, num_inputs, rows.dtype, rows.device)
    depth = min(tile.depth, max(LEAST_SIDE, power_of_two(num_inputs)))
    product = variant(
        state_code.multiply_heads, BM=tile.height, BN=tile.width, BK=depth, PRECISION=precision(rows.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        product, (-(-num_rows // tile.height), -(-num_outputs // tile.width), num_heads), rows, weights, out, num_rows,
        num_outputs, num_inputs, rows.stride(0), rows.stride(1), *weights.stride(), out.stride(0), out.stride(1),
    )  # fmt: skip
