"""The reference attention, which equals, bit for bit, that of transformers with torch's SDPA, on any device."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from corolla.cache.store import gathered
from corolla.compute.attention.base import AttentionBackend, AttentionBatch, LayerInput, PackedRow


class SdpaAttention(AttentionBackend):
    """Attends after gathering each row's keys and values into one tensor; this is simple, not fast."""

    name = "sdpa"

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        query, window = given.query, given.window
        tensors = batch.write(given.layer, given.key, given.value)
        outputs = []
        for number, row in enumerate(batch.rows):
            queries = query[row.start : row.end].transpose(0, 1).unsqueeze(0)
            end = row.position + row.num_tokens
            first_key = 0 if window is None else max(0, row.position - window + 1)
            extents = batch.extents(number, given.layer, first_key, end)
            keys, values = (batch.store.decoded(gathered(tensor, extents)).unsqueeze(0) for tensor in tensors)
            mask = _mask(row, first_key, window, query.device)
            if given.softcap is None and given.sinks is None:
                output = _attend_by_sdpa(queries, keys, values, mask, given.scaling)
            else:
                output = _attend_eagerly(queries, keys, values, mask, given)
            outputs.append(output[0])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _mask(row: PackedRow, first_key: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys from `first_key` on each new token of a row sees, bool `[1, 1, num_tokens, keys]`; None: no mask."""
    end = row.position + row.num_tokens
    # If there is no mask, transformers assumes that the first of several queries is at the first key's position, which
    # holds only for an empty cache. With a full window, it makes a mask even for one token, and torch then sums in
    # another order; so this function makes one, too, to round in the same way.
    if not ((row.num_tokens > 1 and row.position > 0) or (window is not None and end - first_key >= window)):
        return None
    queries = torch.arange(row.position, end, device=device)[:, None]
    keys = torch.arange(first_key, end, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask[None, None]


def _attend_by_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """The output of transformers' function for one row, `[1, num_tokens, heads, value size]`, with fewer copies."""
    groups = query.shape[1] // keys.shape[1]
    is_batch = query.device.type == "cpu" and mask is not None and query.shape[2] > 1 and groups > 1
    if is_batch:
        # transformers would copy all keys and values for each query head that shares them, gigabytes of a long text.
        # If each key head is an entry of a batch, its query heads read the same memory, and the bits are the same.
        query = query.view(-1, groups, *query.shape[2:])
        keys, values = (each[0].unsqueeze(1).expand(-1, groups, -1, -1) for each in (keys, values))
    # transformers' function reads only these attributes of an attention module.
    module: Any = SimpleNamespace(num_key_value_groups=1 if is_batch else groups, is_causal=True)
    output = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)[0]
    return output.transpose(0, 1).flatten(1, 2).unsqueeze(0) if is_batch else output


def _attend_eagerly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, given: LayerInput) -> Tensor:
    """Attention with bounded scores or sinks, like transformers' eager one; torch's fused kernels have neither."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = repeat_kv(keys, groups), repeat_kv(values, groups)
    scores = torch.matmul(query, keys.transpose(2, 3)) * given.scaling
    if given.softcap is not None:
        scores = torch.tanh(scores / given.softcap) * given.softcap
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if given.sinks is not None:
        sinks = given.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[2]]
    return torch.matmul(weights, values).transpose(1, 2).contiguous()
