"""The page tables of a batch, which kernels for GPUs read.

Pages and their tables follow PagedAttention (Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention").
"""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

MOST_PART_BYTES: Final = 1 << 29
"""The most bytes that the results of all pages of single tokens take in a layer. More tokens than that attend as chunks
do, which takes a single one longer, with the same bits."""


@dataclass(frozen=True, slots=True)
class PageTables:
    """The rows of a batch and the places of their keys, for one group of layers. The tensors lie on one device.

    Attributes:
        first_queries: int32 `[rows + 1]`: where each row's queries begin, and where the last row's queries end.
        first_pages: int32 `[rows]`: how many pages with keys the rows before a row have together.
        num_keys: int32 `[rows]`: the keys of each row, counted from its first page on.
        pages: int32 `[rows, longest]`: the ids of each row's pages.
        max_queries: the most queries of a row.
        num_pages: no fewer than all rows' pages with keys.
        page_tokens: tokens of a page.
    """

    first_queries: Tensor
    first_pages: Tensor
    num_keys: Tensor
    pages: Tensor
    max_queries: int
    num_pages: int
    page_tokens: int
