"""Backends that find keys by page tables, and the tables of a batch."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from corolla.compute.attention.batch import AttentionBatch, LayerInput, PackedRow
from corolla.kernels.page_tables import PageTables


class PagedBackend:
    """A backend that finds keys by page tables alone, so that its steps can be recorded."""

    name: str

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        raise NotImplementedError


def tables_of(batch: AttentionBatch, layer: int, device: torch.device) -> PageTables:
    """The tables of a batch for a layer; all layers of a group share them."""
    group = batch.store.group_of(layer)
    tables: PageTables | None = batch.prepared.get(group)
    if tables is None:
        tables = batch.prepared[group] = _tables(batch.rows, group, batch.store.pool.page_tokens, device)
    return tables


def _tables(rows: Sequence[PackedRow], group: int, page_tokens: int, device: torch.device) -> PageTables:
    tables = [row.cache.tables[group] for row in rows]
    num_keys = [row.position + row.num_tokens - table.first_token for row, table in zip(rows, tables, strict=True)]
    longest = max(len(table.pages) for table in tables)
    pages = [[*table.pages, *[0] * (longest - len(table.pages))] for table in tables]
    ends = list(accumulate(-(-keys // page_tokens) for keys in num_keys))

    def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PageTables(
        first_queries=integers([0, *(row.end for row in rows)]),
        first_keys=integers([0, *accumulate(num_keys)]),
        first_pages=integers([0, *ends[:-1]]),
        num_keys=integers(num_keys),
        pages=integers(pages),
        max_queries=max(row.num_tokens for row in rows),
        max_keys=max(num_keys),
        num_pages=ends[-1],
        page_tokens=page_tokens,
    )
