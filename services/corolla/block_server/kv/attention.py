"""Attention over rows of different sessions, packed into one call.

transformers calls `ragged_attention` in every layer with the new queries, keys and values of all rows, one after the
other. It stores each row's keys and values in that row's own cache and attends to them; rows never see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from corolla.block_server.kv.store import SessionCache

RAGGED = "corolla_ragged"


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row's place in a packed call: its tokens are `[start, end)` of the packed dimension.

    Attributes:
        cache: the session's.
        position: of the first new token in the session.
    """

    cache: SessionCache
    position: int
    start: int
    end: int


class RaggedBatch:
    """The rows of one call, and the masks that layers of the same kind share."""

    def __init__(self, rows: Sequence[PackedRow]) -> None:
        self.rows = tuple(rows)
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def mask(self, position: int, num_tokens: int, first_key: int, window: int | None, device: torch.device) -> Tensor:
        """Which keys, from `first_key` on, each of a row's new tokens may see: bool `[1, 1, num_tokens, keys]`."""
        kind = (position, num_tokens, window or 0)
        mask = self._masks.get(kind)
        if mask is None:
            queries = torch.arange(position, position + num_tokens, device=device)[:, None]
            keys = torch.arange(first_key, position + num_tokens, device=device)[None, :]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            mask = self._masks[kind] = mask[None, None]
        return mask


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: RaggedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for packed rows.

    Args:
        module: the family's attention module; its `layer_idx` picks the layer of the caches.
        query: `[1, heads, sum of T, head_dim]`.
        key: `[1, key heads, sum of T, head_dim]`; value likewise.
        attention_mask: unused; transformers makes none for functions that it does not know.
        ragged: the rows.
        scaling: of the scores; None is one over the root of the head size.
        sliding_window: how many tokens, itself included, a token sees; None for all.
        softcap: bound of the scores, or None.

    Returns:
        `[1, sum of T, heads, head_dim]` and None.
    """
    rows = ragged.rows
    if len(rows) == 1:
        return _attend(module, query, key, value, ragged, rows[0], scaling, sliding_window, softcap), None
    outputs = []
    for row in rows:
        tokens = slice(row.start, row.end)
        parts = query[:, :, tokens], key[:, :, tokens], value[:, :, tokens]
        outputs.append(_attend(module, *parts, ragged, row, scaling, sliding_window, softcap))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(RAGGED, ragged_attention)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ragged: RaggedBatch,
    row: PackedRow,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    num_tokens = query.shape[2]
    layer: Any = module.layer_idx
    keys, values = row.cache.write(layer, row.position, key[0], value[0])
    first_key = 0 if window is None else max(0, row.position - window + 1)
    if first_key:
        keys, values = keys[:, first_key:], values[:, first_key:]
    # Without a mask the library assumes that several queries start together with the keys, which is true of an empty
    # cache only. From a full window on it would make a mask even for one token, which takes another path to the sums;
    # so does this, to round alike.
    masked = (num_tokens > 1 and row.position > 0) or (window is not None and keys.shape[1] >= window)
    mask = ragged.mask(row.position, num_tokens, first_key, window, query.device) if masked else None
    if softcap is None:
        output: Tensor = sdpa_attention_forward(
            module, query, keys.unsqueeze(0), values.unsqueeze(0), mask, scaling=scaling
        )[0]
        return output
    if mask is None:
        mask = ragged.mask(row.position, num_tokens, first_key, window, query.device)
    return _attend_capped(query, keys.unsqueeze(0), values.unsqueeze(0), mask, scaling, softcap)


def _attend_capped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with bounded scores, which torch's fused kernels lack; the same steps as transformers' eager one."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = repeat_kv(keys, groups), repeat_kv(values, groups)
    scores = torch.matmul(query, keys.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values).transpose(1, 2).contiguous()
