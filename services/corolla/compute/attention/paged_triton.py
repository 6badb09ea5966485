"""Attention over pages of any size by Triton kernels, with the same bits for a token whatever else is in the batch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Final

import torch
from torch import Tensor

from corolla.cache.store import KVStore
from corolla.chassis.errors import StartupError
from corolla.compute.attention.base import (
    SHORT_ROW,
    AttentionBackend,
    AttentionBatch,
    LayerInput,
    NumberLists,
    PackedRow,
    slots_of,
)
from corolla.compute.attention.sdpa import SdpaAttention
from corolla.kernels.page_tables import PageTables
from corolla.kernels.triton.availability import missing
from corolla.wire.device_copies import copied_numbers

MOST_KEYS_OF_SHORT_ROWS: Final = 2**19
"""How many keys the tokens of short rows read at most, counted for each of them. The results of their pages take 128
MiB, if a model has 32 heads of 128 numbers, and a page 64 tokens."""


class PagedTriton(AttentionBackend):
    """Our own kernels, for CUDA; Triton's interpreter runs them on a CPU.

    Each page of a row is computed by itself, and the pages are merged in their order, for single tokens as for chunks.
    Keys and values in eight bits are decoded in registers.

    Raises:
        StartupError: triton is not installed.
    """

    name = "triton"

    def __init__(self) -> None:
        if (lack := missing()) is not None:
            raise StartupError(lack)
        self._other = SdpaAttention()

    def batch(
        self, store: KVStore, rows: Sequence[PackedRow], device: torch.device, others: NumberLists = ()
    ) -> tuple[AttentionBatch, list[Tensor]]:
        """See `AttentionBackend.batch`. Slots and page tables come to the device by the same copy as the others."""
        groups, parts = range(len(store.rules)), self.parts(rows)
        numbers = [[_Numbers(part, group, store.pool.page_tokens) for part in parts] for group in groups]
        slots = [(slots_of(rows, group), torch.int64) for group in groups]
        lists = [each for of_group in numbers for part in of_group for each in part.lists]
        copied = iter(copied_numbers([*others, *slots, *lists], device))
        given, copied_slots = [next(copied) for _ in others], {group: next(copied) for group in groups}
        tables = {group: tuple(part.tables(copied) for part in numbers[group]) for group in groups}
        return AttentionBatch(store, rows, self, slots=copied_slots, prepared=tables), given

    def parts(self, rows: Sequence[PackedRow]) -> Sequence[Sequence[PackedRow]]:
        """The rows in the parts that have page tables of their own, in order: single tokens, and the chunks.

        A program for chunks reads all pages of its tokens one after another. A row of few tokens, such as one that
        checks drafts, has few of these programs, so its tokens count as single ones; but only as many of them as the
        results of all pages have room for.
        """
        num_short = _num_leading(rows, SHORT_ROW)
        singles = [
            PackedRow(row.cache, row.position + index, row.start + index, row.start + index + 1)
            for row in rows[:num_short]
            for index in range(row.num_tokens)
        ]
        if len(singles) > num_short and sum(row.position for row in singles) > MOST_KEYS_OF_SHORT_ROWS:
            num_short = _num_leading(rows, 1)
            singles = list(rows[:num_short])
        return tuple(part for part in (singles, rows[num_short:]) if part)

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        if given.key.shape[-1] != given.value.shape[-1]:
            return self._other.attend(batch, given)
        keys, values = batch.write(given.layer, given.key, given.value)
        return attend_stored(batch, replace(given, query=given.query.contiguous(), key=keys, value=values))

    def attend_to_latents(self, batch: AttentionBatch, layer: int, query: Tensor, scaling: float) -> Tensor | None:
        """See `AttentionBackend.attend_to_latents`."""
        return attend_stored(batch, LayerInput(layer, query, *batch.store.layer(layer), scaling))


def _num_leading(rows: Sequence[PackedRow], most_tokens: int) -> int:
    """How many rows there are before the first one of more tokens."""
    return next((index for index, row in enumerate(rows) if row.num_tokens > most_tokens), len(rows))


def attend_stored(batch: AttentionBatch, given: LayerInput) -> Tensor:
    """Attends to keys and values that are stored already.

    Args:
        batch: the rows.
        given: a contiguous query; `key` and `value` are those of all sessions, `[slots, key heads, head_dim]` each, as
            the batch's store has them. In multi-latent attention they are latents and rotated keys.

    Returns:
        `[N, heads, head_dim]`, or `[N, heads, latent size]`, in the query's dtype, on its device.
    """
    from corolla.kernels.triton.launches import attend, empty_output

    codec = batch.store.codec
    out = empty_output(given.query, given.key, given.value, None if codec is None else codec.name)
    for tables in batch.prepared[batch.store.group_of(given.layer)]:
        attend(
            given.query, given.key, given.value, tables, scaling=given.scaling, window=given.window,
            softcap=given.softcap, sinks=given.sinks, codec=None if codec is None else codec.name, out=out,
        )  # fmt: skip
    return out


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
        lists = (first_queries, [0, *ends[:-1]], num_keys, pages)
        self.lists = [(each, torch.int32) for each in lists]
        self._max_queries = max(row.num_tokens for row in rows)
        self._num_pages, self._page_tokens = ends[-1], page_tokens

    def tables(self, copied: Iterator[Tensor]) -> PageTables:
        """Takes the next lists of `copied`, int32 `[length]` each on a device, and makes the tables of them."""
        first_queries, first_pages, num_keys, pages = islice(copied, len(self.lists))
        return PageTables(
            first_queries=first_queries,
            first_pages=first_pages,
            num_keys=num_keys,
            pages=pages.view(-1, self._longest),
            max_queries=self._max_queries,
            num_pages=self._num_pages,
            page_tokens=self._page_tokens,
        )
