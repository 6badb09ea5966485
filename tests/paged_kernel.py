"""Attention over pages through page tables, by its definition: what flash attention computes on a GPU."""

from typing import Any

import torch
from torch import Tensor


def paged_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_queries: Tensor,
    first_keys: None,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    seqused_k: Tensor,
    block_table: Tensor,
    **_options: Any,
) -> Tensor:
    """Attends as `torch.nn.attention.varlen.varlen_attn` does.

    Keys and values are `[pages, page tokens, key heads, head_dim]`. The function may be recorded: it looks at tensors
    with tensors only.
    """
    num_rows, num_pages = block_table.shape
    entries = torch.arange(len(query), device=query.device)
    row = torch.searchsorted(first_queries[1:], entries.to(first_queries.dtype), right=True)
    # A row's last query is as far as its last key.
    place = seqused_k[row] - first_queries[row + 1] + entries
    position = torch.arange(num_pages * keys.shape[1], device=query.device)
    seen = position[None, :] <= place[:, None]
    if window_size[0] >= 0:
        seen &= position[None, :] >= place[:, None] - window_size[0]
    groups = query.shape[1] // keys.shape[2]
    keys, values = (
        part[block_table.long()].reshape(num_rows, len(position), *part.shape[2:])[row].repeat_interleave(groups, dim=2)
        for part in (keys, values)
    )
    # Memory that was never written may hold anything.
    keys, values = (part.masked_fill(~seen[:, :, None, None], 0.0) for part in (keys, values))
    scores = torch.einsum("qhd,qkhd->qhk", query.float(), keys.float()) * scale
    weights = scores.masked_fill(~seen[:, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("qhk,qkhd->qhd", weights, values.float()).to(query.dtype)
