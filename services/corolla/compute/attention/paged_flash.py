"""Flash attention that reads pages through page tables, for all rows in one call.

The kernel is FlashAttention (Dao et al. 2022; Dao 2023); pages and their tables are those of PagedAttention (Kwon et
al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from corolla.compute.attention.batch import AttentionBatch, LayerInput, PackedRow
from corolla.compute.attention.partial_attention import math
from corolla.compute.attention.run_attention import RunAttention

PagedKernel = Callable[..., Any]
"""A function with the arguments of `torch.nn.attention.varlen.varlen_attn`."""


@dataclass(frozen=True, slots=True)
class BatchTables:
    """The rows of a batch as arguments of the kernel, for one group of layers. The tensors lie on the model's device.

    Attributes:
        first_queries: int32 `[rows + 1]`: where each row's queries begin, and where the last row's queries end.
        first_keys: int32 `[rows + 1]`: the same for keys, as if all rows' keys lay one after another. The kernel finds
            keys by `pages`, but refuses a call without `first_keys`.
        num_keys: int32 `[rows]`: the keys of each row, counted from its first page on.
        pages: int32 `[rows, longest]`: the ids of each row's pages.
        max_queries: the most queries of a row.
        max_keys: the most keys of a row.
    """

    first_queries: Tensor
    first_keys: Tensor
    num_keys: Tensor
    pages: Tensor
    max_queries: int
    max_keys: int


class PagedFlash:
    """torch's variable-length flash attention with block tables; for half precision on CUDA.

    The kernel must not split a row's keys among thread blocks (`num_splits=1`): the split, and so the rounding, depends
    on the longest row of the batch, but a session's tokens must not depend on other rows.

    Args:
        kernel: the function that computes attention.
    """

    name = "paged"

    def __init__(self, kernel: PagedKernel = varlen_attn) -> None:
        self._kernel = kernel
        self._capped = RunAttention("math", math)

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        if given.softcap is not None:
            return self._capped.attend(batch, given)
        keys, values = batch.write(given.layer, given.key, given.value)
        group = batch.store.group_of(given.layer)
        tables = batch.prepared.get(group)
        if tables is None:
            tables = batch.prepared[group] = _tables(batch.rows, group, given.query.device)
        page_tokens = batch.store.pool.page_tokens
        output: Tensor = self._kernel(
            given.query.contiguous(),
            keys.view(-1, page_tokens, *keys.shape[1:]),
            values.view(-1, page_tokens, *values.shape[1:]),
            tables.first_queries,
            tables.first_keys,
            tables.max_queries,
            tables.max_keys,
            scale=given.scaling,
            window_size=(-1 if given.window is None else given.window - 1, 0),
            enable_gqa=True,
            seqused_k=tables.num_keys,
            block_table=tables.pages,
            num_splits=1,
        )
        return output


def _tables(rows: Sequence[PackedRow], group: int, device: torch.device) -> BatchTables:
    tables = [row.cache.tables[group] for row in rows]
    num_keys = [row.position + row.num_tokens - table.first_token for row, table in zip(rows, tables, strict=True)]
    longest = max(len(table.pages) for table in tables)
    pages = [[*table.pages, *[0] * (longest - len(table.pages))] for table in tables]

    def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return BatchTables(
        first_queries=integers([0, *(row.end for row in rows)]),
        first_keys=integers([0, *accumulate(num_keys)]),
        num_keys=integers(num_keys),
        pages=integers(pages),
        max_queries=max(row.num_tokens for row in rows),
        max_keys=max(num_keys),
    )
