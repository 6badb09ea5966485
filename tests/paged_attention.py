"""Attention that finds keys by page tables, by its definition, so that steps can be recorded without a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from corolla.compute.attention.base import AttentionBatch, LayerInput, PackedRow
from corolla.compute.attention.paged_triton import PagedTriton
from corolla.kernels.page_tables import PageTables


class PagedDefinition(PagedTriton):
    """Stands in for the kernels that only GPUs have. It looks at the numbers in tensors with tensors only."""

    name = "paged"

    def __init__(self) -> None:
        pass  # without Triton

    def parts(self, rows: Sequence[PackedRow]) -> Sequence[Sequence[PackedRow]]:
        return (rows,)

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        keys, values = batch.write(given.layer, given.key, given.value)
        (tables,) = batch.prepared[batch.store.group_of(given.layer)]
        keys, values = (part.view(-1, tables.page_tokens, *part.shape[1:]) for part in (keys, values))
        return _attended(given, keys, values, tables)

    def attend_to_latents(self, batch: AttentionBatch, layer: int, query: Tensor, scaling: float) -> Tensor:
        latents, rotated = batch.store.layer(layer)
        # The kernel reads these numbers without a look at strides.
        assert query.is_contiguous()
        assert query.shape[2] == latents.shape[2] + rotated.shape[2]
        (tables,) = batch.prepared[batch.store.group_of(layer)]
        keys, values = (
            part.view(-1, tables.page_tokens, *part.shape[1:]) for part in (torch.cat((latents, rotated), -1), latents)
        )
        return _attended(LayerInput(layer, query, latents, rotated, scaling), keys, values, tables)


def _attended(given: LayerInput, keys: Tensor, values: Tensor, tables: PageTables) -> Tensor:
    """`[N, heads, head_dim]`; keys and values are `[pages, page tokens, key heads, head_dim]`."""
    num_rows, num_pages = tables.pages.shape
    entries = torch.arange(len(given.query), device=given.query.device)
    row = torch.searchsorted(tables.first_queries[1:], entries.to(torch.int32), right=True)
    # A row's last query is as far as its last key.
    place = tables.num_keys[row] - tables.first_queries[row + 1] + entries
    position = torch.arange(num_pages * tables.page_tokens, device=given.query.device)
    seen = position[None, :] <= place[:, None]
    if given.window is not None:
        seen &= position[None, :] > place[:, None] - given.window
    groups = given.query.shape[1] // keys.shape[2]
    keys, values = (
        part[tables.pages.long()]
        .reshape(num_rows, len(position), *part.shape[2:])[row]
        .repeat_interleave(groups, dim=2)
        for part in (keys, values)
    )
    # Memory that was never written may hold anything.
    keys, values = (part.masked_fill(~seen[:, :, None, None], 0.0) for part in (keys, values))
    scores = torch.einsum("qhd,qkhd->qhk", given.query.float(), keys.float()) * given.scaling
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    weights = scores.masked_fill(~seen[:, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("qhk,qkhd->qhd", weights, values.float()).to(given.query.dtype)
