"""Attention over pages through page tables, by its definition: what flash attention computes on a GPU."""

import torch
from torch import Tensor


def paged_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_queries: Tensor,
    first_keys: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """Attends as `torch.nn.attention.varlen.varlen_attn` does, and refuses what it and its kernel refuse.

    Keys and values are `[pages, page tokens, key heads, head_dim]`. The function may be recorded: it looks at the
    numbers in tensors with tensors only.

    Raises:
        TypeError, ValueError: an argument is missing, or has a dtype, shape or layout that the kernel does not take.
    """
    num_rows, num_pages = block_table.shape
    _check(query, keys, values, enable_gqa=enable_gqa)
    for name, numbers, length in (
        ("cu_seq_q", first_queries, num_rows + 1), ("cu_seq_k", first_keys, num_rows + 1),
        ("seqused_k", seqused_k, num_rows),
    ):  # fmt: skip
        if numbers is None:
            raise ValueError("cumulative sequence lengths of queries and keys must be both set or both not set")
        if numbers.dtype != torch.int32 or numbers.shape != (length,) or not numbers.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int32 tensor [{length}]")
    if block_table.dtype != torch.int32 or block_table.stride(-1) != 1:
        raise ValueError("block_table must be int32, with a contiguous last dimension")
    if max_queries < 1 or max_keys < 1 or num_splits != 1:
        raise ValueError("max_q and max_k must be positive, and rows must not split their keys")
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


def _check(query: Tensor, keys: Tensor, values: Tensor, *, enable_gqa: bool) -> None:
    if keys.shape != values.shape or query.dim() != 3 or keys.dim() != 4:
        raise ValueError(
            "query must be [tokens, heads, head_dim], keys and values [pages, page tokens, heads, head_dim]"
        )
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError("query, keys and values must have the same dtype")
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values)):
        raise ValueError("the last dimension of query, keys and values must be contiguous")
    if query.shape[-1] != keys.shape[-1] or keys.shape[-1] % 8 or keys.shape[-1] > 256:
        raise ValueError("query, keys and values need the same head size, a multiple of 8 up to 256")
    heads, key_heads = query.shape[1], keys.shape[2]
    if heads % key_heads or (heads != key_heads and not enable_gqa):
        raise ValueError("the number of query heads must be a multiple of that of key heads, and needs enable_gqa")
