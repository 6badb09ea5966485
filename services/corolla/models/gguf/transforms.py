"""The inverses of what llama.cpp's converter does to tensors; the table of architectures names them.

Each takes the stored tensors that make up one of the model, in the order of the table, and the model's configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from corolla.models.gguf.architectures import Transform

# How many neighbours of a logarithm are tried on each side, so that its exponential is the stored number again.
_NEIGHBOURS: Final = 8


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors after one another.

    Args:
        parts: matrices `[..., rows, columns]`, kernels `[1, rows, 1, columns]` or vectors `[rows]`, of one dtype, on
            the CPU.

    Returns:
        `[..., all rows, columns]` or `[all rows]`, of the same dtype, on the CPU.
    """
    parts = [part.flatten(0, -2) if part.dim() > 3 else part for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2 if parts[0].dim() > 1 else 0)


def _halves(rows: Tensor, num_heads: int) -> Tensor:
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _logarithm(parts: Sequence[Tensor], config: Any) -> Tensor:
    """Takes the number, among those next to the logarithm, whose exponential comes closest to what is stored."""
    wanted = -joined(parts)
    best = wanted.log()
    error = (best.exp() - wanted).abs()
    for step in (torch.inf, -torch.inf):
        tried = wanted.log()
        for _ in range(_NEIGHBOURS):
            tried = torch.nextafter(tried, torch.full_like(tried, step))
            its_error = (tried.exp() - wanted).abs()
            best, error = torch.where(its_error < error, tried, best), torch.minimum(error, its_error)
    return best


def _latents(parts: Sequence[Tensor], config: Any) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    keys, values = parts  # `[heads, latents, numbers]` and `[heads, numbers, latents]`
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _columns(parts: Sequence[Tensor], config: Any) -> Tensor:
    turned = [part.transpose(1, 2) if part.dim() == 3 else part for part in parts]
    return torch.stack(turned, dim=-1).flatten(-2).contiguous()


def _heads(parts: Sequence[Tensor], config: Any) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    mixed, gates = parts
    num_heads, width = config.linear_num_key_heads, config.linear_key_head_dim
    queries, keys, values = mixed.tensor_split((num_heads * width, 2 * num_heads * width))
    each = [part.reshape(num_heads, -1, *part.shape[1:]) for part in (queries, keys, values, gates)]
    return torch.cat(each, dim=1).flatten(0, 1)


def _tiled(parts: Sequence[Tensor], config: Any) -> Tensor:
    rows, num_heads = joined(parts), config.linear_num_key_heads
    in_each = config.linear_num_value_heads // num_heads
    return rows.reshape(in_each, num_heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _tiled_values(parts: Sequence[Tensor], config: Any) -> Tensor:
    rows = joined(parts)
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:before], _tiled([rows[before:]], config)])


TRANSFORMS: Final[Mapping[Transform, Callable[[Sequence[Tensor], Any], Tensor]]] = {
    Transform.QUERIES: lambda parts, config: _halves(joined(parts), config.num_attention_heads),
    Transform.KEYS: lambda parts, config: _halves(joined(parts), config.num_key_value_heads),
    Transform.LESS_ONE: lambda parts, config: joined(parts) - 1,
    Transform.LOGARITHM: _logarithm,
    Transform.LATENTS: _latents,
    Transform.COLUMNS: _columns,
    Transform.HEADS: _heads,
    Transform.TILED: _tiled,
    Transform.TILED_VALUES: _tiled_values,
    Transform.TILED_COLUMNS: lambda parts, config: _tiled([joined(parts).T], config).T.contiguous(),
    Transform.TILED_LOGARITHM: lambda parts, config: _logarithm([_tiled(parts, config)], config),
}
ORDERS: Final = frozenset(
    {
        None, Transform.QUERIES, Transform.KEYS, Transform.COLUMNS, Transform.HEADS, Transform.TILED,
        Transform.TILED_VALUES,
    }
)  # fmt: skip
"""The transforms that only change the order of rows, so that the rows may stay packed; None stands for `joined`.

Packed experts have rows where COLUMNS has columns.
"""


def fitted(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in a shape that differs from its own only by dimensions of 1, or is a list; otherwise as it is.

    Args:
        tensor: of any shape and dtype, on the CPU.

    Returns:
        `[*shape]`, of the same dtype, on the CPU.
    """
    is_list = [tensor.numel()] == list(shape)
    if is_list or [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]:
        return tensor.reshape(tuple(shape))
    return tensor
