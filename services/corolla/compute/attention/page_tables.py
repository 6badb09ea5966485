"""Backends that find keys by page tables, and the tables of a batch."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from corolla.cache.store import KVStore
from corolla.compute.attention.batch import AttentionBatch, LayerInput, PackedRow, slots_of
from corolla.kernels.page_tables import PageTables
from corolla.wire.device_copies import copied_numbers


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
        numbers = _Numbers(batch.rows, group, batch.store.pool.page_tokens)
        tables = batch.prepared[group] = numbers.tables(copied_numbers(numbers.parts, device))
    return tables


def paged_batch(
    store: KVStore,
    rows: Sequence[PackedRow],
    backend: PagedBackend,
    device: torch.device,
    others: Sequence[tuple[Sequence[int], torch.dtype]] = (),
) -> tuple[AttentionBatch, list[Tensor]]:
    """Makes a batch whose slots and page tables are on the device already, by one copy, for which nothing waits.

    Args:
        store: the store of all rows' keys and values.
        rows: rows of different sessions.
        backend: computes the attention.
        device: where the pages are.
        others: lists of numbers that the same copy brings, each with an integer dtype.

    Returns:
        The batch, and the other numbers on the device, `[length]` of their dtypes.
    """
    numbers = [_Numbers(rows, group, store.pool.page_tokens) for group in range(len(store.rules))]
    slots = [(slots_of(rows, group), torch.int64) for group in range(len(numbers))]
    copied = copied_numbers([*others, *slots, *(part for each in numbers for part in each.parts)], device)
    given, copied = copied[: len(others)], copied[len(others) :]
    rest = iter(copied[len(slots) :])
    tables = {group: each.tables([next(rest) for _ in each.parts]) for group, each in enumerate(numbers)}
    return AttentionBatch(store, rows, backend, slots=dict(enumerate(copied[: len(slots)])), prepared=tables), given


class _Numbers:
    """The numbers of the page tables of rows for one group of layers.

    Attributes:
        parts: what `tables` takes, each with its dtype; the pages of all rows follow one another.
    """

    def __init__(self, rows: Sequence[PackedRow], group: int, page_tokens: int) -> None:
        tables = [row.cache.tables[group] for row in rows]
        num_keys = [row.position + row.num_tokens - table.first_token for row, table in zip(rows, tables, strict=True)]
        self._longest = max(len(table.pages) for table in tables)
        ends = list(accumulate(-(-keys // page_tokens) for keys in num_keys))
        pages = [page for table in tables for page in (*table.pages, *[0] * (self._longest - len(table.pages)))]
        lists = ([0, *(row.end for row in rows)], [0, *accumulate(num_keys)], [0, *ends[:-1]], num_keys, pages)
        self.parts = [(each, torch.int32) for each in lists]
        self._max_queries, self._max_keys = max(row.num_tokens for row in rows), max(num_keys)
        self._num_pages, self._page_tokens = ends[-1], page_tokens

    def tables(self, copied: Sequence[Tensor]) -> PageTables:
        """The tables; `copied` are the parts as int32 `[length]` on a device."""
        first_queries, first_keys, first_pages, num_keys, pages = copied
        return PageTables(
            first_queries=first_queries,
            first_keys=first_keys,
            first_pages=first_pages,
            num_keys=num_keys,
            pages=pages.view(-1, self._longest),
            max_queries=self._max_queries,
            max_keys=self._max_keys,
            num_pages=self._num_pages,
            page_tokens=self._page_tokens,
        )
