"""The inputs and output of a decode step, in tensors with fixed addresses, so that a recorded step can run again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from corolla.cache.states import NO_SLOT
from corolla.cache.store import KVStore, SessionCache
from corolla.compute.attention.base import AttentionBackend, AttentionBatch
from corolla.kernels.page_tables import PageTables
from corolla.kernels.state_rows import StateRows

NewToken = tuple[SessionCache, int]
"""A session's cache, prepared for one more token, and the position of that token."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step for which the buffers have room, in the numbers that they hold of it.

    Attributes:
        tokens: the new token of each row.
        columns: the positions, the slots of states that are read and written if the store has a table of them, and
            then, for each group, slots and numbers of keys; each list ends with padding.
        versions: for each group, the versions of the rows' page tables.
        slots: the slots of the rows' adapters in the table of adapters; None: no row has one.
    """

    tokens: Sequence[NewToken]
    columns: list[list[int]]
    versions: list[list[int]]
    slots: Sequence[int] | None = None


class DecodeBuffers:
    """Inputs and output of a step of one new token for each of up to `max_rows` sessions.

    A step of size `size` reads the first `size` entries of each tensor. Entries without a session are padding: they
    write their keys and values to the store's scratch page, attend only to that page, and their output is not read.

    Args:
        store: the KV store; it needs a scratch page.
        max_rows: the most rows of a step.
        max_tokens: the most tokens of a session; a step with a longer session does not fit.
        like: any tensor `[..., H]` with the dtype and device of hidden states.
        most_pages: the most pages that all rows of a step hold together; a step with more does not fit. None: there is
            no limit but the pages of the store.

    Attributes:
        max_tokens: the most tokens of a session.
        hidden: `[max_rows, H]`, dtype and device of `like`: the step's input.
        positions: int64 `[max_rows]`, on the same device.
        output: `[max_rows, H]`, dtype and device of `like`, filled by the step.
    """

    def __init__(
        self, store: KVStore, max_rows: int, max_tokens: int, like: Tensor, most_pages: int | None = None
    ) -> None:
        if store.scratch_page is None:
            raise ValueError("padding needs a scratch page")
        self.max_tokens = max_tokens
        self._store = store
        self._max_rows = max_rows
        self._scratch_page = store.scratch_page
        self.hidden = like.new_zeros(max_rows, like.shape[-1])
        self.output = torch.zeros_like(self.hidden)
        self._pages = [
            torch.full(
                (max_rows, rule.worst_case(store.pool, max_tokens)), store.scratch_page, dtype=torch.int32,
                device=like.device,
            )
            for rule in store.rules
        ]  # fmt: skip
        # Rows that share pages count them once each; more than the store has twice is rare.
        self._max_pages = max_rows + 2 * store.pool.num_pages
        if most_pages is not None:
            self._max_pages = min(self._max_pages, most_pages)
        # The columns are positions, slots of states, then each group's slots and numbers of keys. These change with
        # every step, and one copy writes them all.
        scratch_slot = store.scratch_page * store.pool.page_tokens
        table = store.state_table
        self._padding_row = (0, *(() if table is None else (NO_SLOT, table.scratch_slot)))
        self._written_columns = [
            [number] * max_rows for number in (*self._padding_row, *(scratch_slot, 1) * len(store.rules))
        ]
        self._columns = torch.tensor(self._written_columns, device=like.device)
        # The versions of the page tables that were written, for each group.
        self._written: list[list[int]] = [[] for _ in store.rules]
        self._first_queries = torch.arange(max_rows + 1, dtype=torch.int32, device=like.device)

    @property
    def positions(self) -> Tensor:
        """The positions of the new tokens, int64 `[max_rows]`."""
        return self._columns[0]

    def states(self, size: int) -> StateRows | None:
        """The slots of the states of a step of `size`; None: there are none."""
        if len(self._padding_row) == 1:
            return None
        sources, targets = self._columns[1:3, :size]
        return StateRows(sources, targets, self._first_queries[: size + 1], self._first_queries[:size])

    def step(self, tokens: Sequence[NewToken]) -> DecodeStep | None:
        """The step of these new tokens; None if the buffers have no room for it."""
        padding, page_tokens = self._max_rows - len(tokens), self._store.pool.page_tokens
        if padding < 0 or any(position >= self.max_tokens for _, position in tokens):
            return None
        versions: list[list[int]] = []
        rows: list[tuple[int, ...]] = [(position,) for _, position in tokens]
        if self._store.state_table is not None:
            rows = [(position, *cache.state_slots(position, 1)) for cache, position in tokens]
        columns = [[row[which] for row in rows] + [number] * padding for which, number in enumerate(self._padding_row)]
        scratch_slots, single_keys = [self._scratch_page * page_tokens] * padding, [1] * padding
        for group, pages in enumerate(self._pages):
            slots, num_keys, group_versions, num_pages = [], [], [], padding
            for cache, position in tokens:
                table = cache.tables[group]
                slot, keys = table.newest(position)
                slots.append(slot)
                num_keys.append(keys)
                group_versions.append(table.version)
                num_pages += -(-keys // page_tokens)
            if num_pages > self._max_pages or max(num_keys, default=0) > pages.shape[1] * page_tokens:
                return None
            columns += (slots + scratch_slots, num_keys + single_keys)
            versions.append(group_versions)
        return DecodeStep(tokens, columns, versions)

    def write(self, step: DecodeStep, size: int) -> None:
        """Writes all inputs of a step of `size` but `hidden`; entries behind the step's rows become padding.

        What the buffers hold already is not written again, so a step may be written before its hidden states are known.

        Args:
            step: at most `size` rows, whose pages may be written.
        """
        if step.columns != self._written_columns:
            self.write_numbers(self._columns, step.columns)
            self._written_columns = step.columns
        padding = size - len(step.tokens)
        for group, tensor in enumerate(self._pages):
            # Sessions get their pages when they open, so consecutive steps of a batch mostly have the same pages.
            versions = step.versions[group] + [0] * padding
            if versions != self._written[group]:
                pages = [list(cache.tables[group].pages[: tensor.shape[1]]) for cache, _ in step.tokens]
                pages += [[self._scratch_page]] * padding
                longest = max(map(len, pages))
                filled = [[*each, *[self._scratch_page] * (longest - len(each))] for each in pages]
                self.write_numbers(tensor[:size, :longest], filled)
                self._written[group] = versions

    @staticmethod
    def write_numbers(target: Tensor, numbers: list[list[int]]) -> None:
        """Writes numbers to a device in their turn: after the steps that were launched, without waiting for these.

        Args:
            target: `[rows, numbers of a row]` of any integer dtype, on any device.
            numbers: the rows.
        """
        made = torch.tensor(numbers, dtype=target.dtype, pin_memory=target.device.type == "cuda")
        target.copy_(made, non_blocking=True)

    def batch(self, size: int, backend: AttentionBackend) -> AttentionBatch:
        """The attention batch of a step of `size` over these buffers.

        A step calls this method itself, so that the tensor operations of the method are recorded with the step.
        """
        columns = self._columns[:, :size]
        first = len(self._padding_row)
        num_keys = [column.to(torch.int32) for column in columns[first + 1 :: 2]]
        page_tokens = self._store.pool.page_tokens
        num_pages = [(keys + (page_tokens - 1)) // page_tokens for keys in num_keys]
        tables = {
            group: PageTables(
                first_queries=self._first_queries[: size + 1],
                first_pages=pad(num_pages[group].cumsum(0, dtype=torch.int32), (1, 0))[:-1],
                num_keys=num_keys[group],
                pages=pages[:size],
                max_queries=1,
                num_pages=min(size * pages.shape[1], self._max_pages),
                page_tokens=page_tokens,
            )
            for group, pages in enumerate(self._pages)
        }
        slots = {group: columns[first + 2 * group] for group in tables}
        prepared = {group: (each,) for group, each in tables.items()}
        return AttentionBatch(self._store, (), backend, slots=slots, prepared=prepared)
