"""The rows of a batch as tensors of page tables, which kernels for GPUs read.

Pages and their tables are those of PagedAttention (Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from corolla.compute.attention.batch import AttentionBatch, LayerInput, PackedRow


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The rows of a batch as arguments of a kernel, for one group of layers. The tensors lie on the model's device.

    Attributes:
        first_queries: int32 `[rows + 1]`: where each row's queries begin, and where the last row's queries end.
        first_keys: int32 `[rows + 1]`: the same for keys, as if all rows' keys lay one after another. Flash attention
            finds keys by `pages`, but refuses a call without `first_keys`.
        first_pages: int32 `[rows]`: how many pages with keys the rows before a row have together.
        num_keys: int32 `[rows]`: the keys of each row, counted from its first page on.
        pages: int32 `[rows, longest]`: the ids of each row's pages.
        max_queries: the most queries of a row.
        max_keys: the most keys of a row.
        num_pages: no fewer than all rows' pages with keys.
    """

    first_queries: Tensor
    first_keys: Tensor
    first_pages: Tensor
    num_keys: Tensor
    pages: Tensor
    max_queries: int
    max_keys: int
    num_pages: int


class PagedBackend:
    """A backend that finds keys by page tables alone, so that its steps can be recorded."""

    name: str

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        raise NotImplementedError


def tables_of(batch: AttentionBatch, layer: int, device: torch.device) -> BatchTables:
    """The tables of a batch for a layer; all layers of a group share them."""
    group = batch.store.group_of(layer)
    tables: BatchTables | None = batch.prepared.get(group)
    if tables is None:
        tables = batch.prepared[group] = _tables(batch.rows, group, batch.store.pool.page_tokens, device)
    return tables


def _tables(rows: Sequence[PackedRow], group: int, page_tokens: int, device: torch.device) -> BatchTables:
    tables = [row.cache.tables[group] for row in rows]
    num_keys = [row.position + row.num_tokens - table.first_token for row, table in zip(rows, tables, strict=True)]
    longest = max(len(table.pages) for table in tables)
    pages = [[*table.pages, *[0] * (longest - len(table.pages))] for table in tables]
    ends = list(accumulate(-(-keys // page_tokens) for keys in num_keys))

    def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return BatchTables(
        first_queries=integers([0, *(row.end for row in rows)]),
        first_keys=integers([0, *accumulate(num_keys)]),
        first_pages=integers([0, *ends[:-1]]),
        num_keys=integers(num_keys),
        pages=integers(pages),
        max_queries=max(row.num_tokens for row in rows),
        max_keys=max(num_keys),
        num_pages=ends[-1],
    )
