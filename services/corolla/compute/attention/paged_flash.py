"""Flash attention that reads pages through page tables, for all rows in one call.

The kernel is FlashAttention (Dao et al. 2022; Dao 2023).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from corolla.compute.attention.batch import AttentionBatch, LayerInput
from corolla.compute.attention.page_tables import PagedBackend, tables_of
from corolla.compute.attention.partial_attention import math
from corolla.compute.attention.run_attention import RunAttention

PagedKernel = Callable[..., Any]
"""A function with the arguments of `torch.nn.attention.varlen.varlen_attn`."""


class PagedFlash(PagedBackend):
    """torch's variable-length flash attention with block tables; for half precision on CUDA.

    The kernel must not split a row's keys among thread blocks (`num_splits=1`): the split, and so the rounding, depends
    on the longest row of the batch, but a session's tokens must not depend on other rows.

    Args:
        kernel: the function that computes attention.
    """

    name = "paged"

    def __init__(self, kernel: PagedKernel = varlen_attn) -> None:
        self._kernel = kernel
        self._other = RunAttention("math", math)

    def attend(self, batch: AttentionBatch, given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""
        if given.softcap is not None or given.sinks is not None:
            return self._other.attend(batch, given)
        keys, values = batch.write(given.layer, given.key, given.value)
        (tables,) = tables_of(batch, given.layer, given.query.device)
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
