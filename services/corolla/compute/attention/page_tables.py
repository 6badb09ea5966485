"""Backends that find keys by page tables, and the tables of a batch."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from corolla.cache.store import KVStore
from corolla.compute.attention.base import AttentionBatch, LayerInput, PackedRow, slots_of
from corolla.kernels.page_tables import PageTables
from corolla.wire.device_copies import copied_numbers


class PagedBackend:
    """A backend that finds keys by page tables alone, so that its steps can be recorded."""

    name: str

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        raise NotImplementedError

    def parts(self, rows: Sequence[PackedRow]) -> Sequence[Sequence[PackedRow]]:
        """The rows in the parts that have page tables of their own, in order; no part is empty.

        Several consecutive rows of one session may stand for a row.
        """
        return (rows,)


def tables_of(batch: AttentionBatch, layer: int, device: torch.device) -> Sequence[PageTables]:
    """The tables of a batch for a layer, one for each part of its rows; all layers of a group share them."""
    group = batch.store.group_of(layer)
    tables: Sequence[PageTables] | None = batch.prepared.get(group)
    if tables is None:
        parts = batch.backend.parts(batch.rows) if isinstance(batch.backend, PagedBackend) else (batch.rows,)
        numbers = [_Numbers(part, group, batch.store.pool.page_tokens) for part in parts]
        copied = iter(copied_numbers([each for part in numbers for each in part.lists], device))
        tables = batch.prepared[group] = tuple(part.tables(copied) for part in numbers)
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
    groups, parts = range(len(store.rules)), backend.parts(rows)
    numbers = [[_Numbers(part, group, store.pool.page_tokens) for part in parts] for group in groups]
    slots = [(slots_of(rows, group), torch.int64) for group in groups]
    lists = [each for of_group in numbers for part in of_group for each in part.lists]
    copied = iter(copied_numbers([*others, *slots, *lists], device))
    given, copied_slots = [next(copied) for _ in others], {group: next(copied) for group in groups}
    tables = {group: tuple(part.tables(copied) for part in numbers[group]) for group in groups}
    return AttentionBatch(store, rows, backend, slots=copied_slots, prepared=tables), given


class _Numbers:
    """The numbers of the page tables of rows for one group of layers.

    Attributes:
        lists: what `tables` takes, each with its dtype; the pages of all rows follow one another.
    """

    def __init__(self, rows: Sequence[PackedRow], group: int, page_tokens: int) -> None:
        tables = [row.cache.tables[group] for row in rows]
        num_keys = [row.position + row.num_tokens - table.first_token for row, table in zip(rows, tables, strict=True)]
        self._longest = max(len(table.pages) for table in tables)
        ends = list(accumulate(-(-keys // page_tokens) for keys in num_keys))
        pages = [page for table in tables for page in (*table.pages, *[0] * (self._longest - len(table.pages)))]
        first_queries = [rows[0].start, *(row.end for row in rows)]
        lists = (first_queries, [0, *accumulate(num_keys)], [0, *ends[:-1]], num_keys, pages)
        self.lists = [(each, torch.int32) for each in lists]
        self._max_queries, self._max_keys = max(row.num_tokens for row in rows), max(num_keys)
        self._num_pages, self._page_tokens = ends[-1], page_tokens

    def tables(self, copied: Iterator[Tensor]) -> PageTables:
        """Takes the next lists of `copied`, int32 `[length]` each on a device, and makes the tables of them."""
        first_queries, first_keys, first_pages, num_keys, pages = islice(copied, len(self.lists))
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
