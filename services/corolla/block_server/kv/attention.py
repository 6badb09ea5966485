"""Attention over rows of different sessions, packed into one call.

transformers calls `ragged_attention` in every layer with the new queries, keys and values of all rows, one after the
other. It writes all keys and values into the pages of their sessions, and each row attends to its own session's tokens
where they lie: once for each run of slots. Parts are put together by the log-sum-exp of their scores, as in
flash decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from corolla.block_server.kv.store import KVStore, SessionCache

RAGGED = "corolla_ragged"


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row's place in a packed call: its tokens are `[start, end)` of the packed dimension.

    Attributes:
        cache: the session's, prepared for this step.
        position: of the first new token in the session.
    """

    cache: SessionCache
    position: int
    start: int
    end: int


class RaggedBatch:
    """The rows of one call, and what layers of the same kind share: slots and masks.

    Args:
        store: where all rows' keys and values lie.
        rows: of different sessions.
    """

    def __init__(self, store: KVStore, rows: Sequence[PackedRow]) -> None:
        self.store = store
        self.rows = tuple(rows)
        self._slots: dict[int, Tensor] = {}
        self._extents: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of all rows.

        Args:
            layer: index within the server's span.
            keys: `[key heads, sum of T, head_dim]`; values likewise.

        Returns:
            The layer's keys and values, `[num_slots, key heads, head_dim]`.
        """
        group = self.store.group_of(layer)
        slots = self._slots.get(group)
        if slots is None:
            numbers = [slot for row in self.rows for slot in row.cache.slots(row.position, row.end - row.start, group)]
            slots = self._slots[group] = torch.tensor(numbers, device=keys.device)
        all_keys, all_values = self.store.layer_like(layer, keys, values)
        all_keys.index_copy_(0, slots, keys.transpose(0, 1))
        all_values.index_copy_(0, slots, values.transpose(0, 1))
        return all_keys, all_values

    def extents(self, number: int, layer: int, start: int) -> tuple[tuple[int, int], ...]:
        """Where the keys of a row lie, from position `start` on."""
        group = self.store.group_of(layer)
        extents = self._extents.get((number, group, start))
        if extents is None:
            row = self.rows[number]
            end = row.position + row.end - row.start
            extents = self._extents[number, group, start] = row.cache.extents(end, start, group)
        return extents

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
    layer: Any = module.layer_idx
    keys, values = ragged.write(layer, key[0], value[0])
    outputs = []
    for number, row in enumerate(ragged.rows):
        part = query if len(ragged.rows) == 1 else query[:, :, row.start : row.end]
        first_key = 0 if sliding_window is None else max(0, row.position - sliding_window + 1)
        extents = ragged.extents(number, layer, first_key)
        mask = _mask(ragged, row, first_key, sliding_window, query.device)
        if softcap is not None:
            if mask is None:
                mask = ragged.mask(row.position, row.end - row.start, first_key, sliding_window, query.device)
            held = _gathered(keys, extents), _gathered(values, extents)
            outputs.append(_attend_capped(part, *held, mask, scaling, softcap))
        elif len(extents) > 1 and keys.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
            outputs.append(_attend_in_parts(part, keys, values, extents, mask, scaling))
        else:
            held = _gathered(keys, extents), _gathered(values, extents)
            outputs.append(sdpa_attention_forward(module, part, *held, mask, scaling=scaling)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


AttentionInterface.register(RAGGED, ragged_attention)


def _mask(
    ragged: RaggedBatch, row: PackedRow, first_key: int, window: int | None, device: torch.device
) -> Tensor | None:
    num_tokens = row.end - row.start
    num_keys = row.position + num_tokens - first_key
    # Without a mask the library assumes that several queries start together with the keys, which is true of an empty
    # cache only. From a full window on it would make a mask even for one token, which takes another path to the sums;
    # so does this, to round alike.
    if (num_tokens > 1 and row.position > 0) or (window is not None and num_keys >= window):
        return ragged.mask(row.position, num_tokens, first_key, window, device)
    return None


def _gathered(tensor: Tensor, extents: Sequence[tuple[int, int]]) -> Tensor:
    """`[1, key heads, tokens, head_dim]`: a view of one run of slots, or a copy of several."""
    parts = [tensor.narrow(0, start, count) for start, count in extents]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1).unsqueeze(0)


def _attend_in_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    extents: Sequence[tuple[int, int]],
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Attends to each run of slots and merges the parts; the queries of a key head's group count as more tokens."""
    _, num_heads, num_tokens, head_size = query.shape
    num_key_heads = keys.shape[1]
    num_groups = num_heads // num_key_heads
    grouped = query.reshape(1, num_key_heads, num_groups * num_tokens, head_size)
    if mask is None and num_tokens > 1:
        # An empty cache: all queries start together with the keys.
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()[None, None]
    bias = None
    if mask is not None:
        mask = mask.repeat(1, 1, num_groups, 1)
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    outputs, sums = [], []
    seen = 0
    for start, count in extents:
        part = slice(seen, seen + count)
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped,
            keys.narrow(0, start, count).transpose(0, 1).unsqueeze(0),
            values.narrow(0, start, count).transpose(0, 1).unsqueeze(0),
            attn_mask=None if bias is None else bias[..., part],
            scale=scaling,
        )
        if mask is not None:
            # For a token that sees nothing of a part the kernel says 0; no part of nothing has any weight.
            log_sum = log_sum.masked_fill(~mask[:, :, :, part].any(dim=-1), -torch.inf)
        outputs.append(output)
        sums.append(log_sum)
        seen += count
    weights = torch.stack(sums).softmax(dim=0).to(query.dtype)
    merged = (torch.stack(outputs) * weights.unsqueeze(-1)).sum(dim=0)
    return merged.view(1, num_heads, num_tokens, head_size).transpose(1, 2)


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
