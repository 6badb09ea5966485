"""Multiplies by panels of weights, with functions that are compiled for this processor once for each layout.

A compilation takes a fifth of a second. All tensors are on the CPU.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from corolla.chassis.errors import StartupError
from corolla.kernels.compiler import Compiled, processor_features, share, why_unavailable
from corolla.kernels.layouts import PLAIN_BFLOAT16, PLAIN_FLOAT32, Layout, PlainLayout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.product_source import JOB, MAX_FEW_ROWS, Rows, Tiles, module_source, scratch_bytes


@dataclass(frozen=True, slots=True)
class Tilings:
    """The tile sizes for weights that are unpacked during the product (`packed`), and for plain ones.

    The registers hold a tile's sums, its weights and one input.
    """

    packed: Tiles
    plain: Tiles


WIDE: Final = Tilings(
    packed=((8, 2), (8, 1), (4, 4), (4, 2), (4, 1), (2, 4), (2, 2), (2, 1), (1, 4), (1, 1)),
    plain=((6, 4), (6, 2), (6, 1), (4, 4), (4, 2), (4, 1), (2, 4), (2, 2), (2, 1), (1, 4), (1, 1)),
)
"""The tile sizes for processors with 32 registers of 16 numbers."""
NARROW: Final = Tilings(
    packed=((4, 1), (2, 2), (2, 1), (1, 2), (1, 1)),
    plain=((6, 1), (4, 1), (3, 1), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)),
)
"""The tile sizes for processors with smaller or fewer registers."""
DTYPES: Final = {Rows.FLOAT32: torch.float32, Rows.BFLOAT16: torch.bfloat16}
_Job: Final = ctypes.c_int64 * len(JOB)
LEAST_PRODUCTS_OF_THREADS: Final = 1 << 19
"""The least number of multiplications for which it pays to wake another thread."""


class Kernel:
    """Multiplies by matrices of one layout.

    Args:
        layout: the layout of the panels.
        rows: the type of the rows: float32 or bfloat16; plain float32 weights need float32 rows.
        tilings: the tile sizes, which change no bit of the results; None: those that fit this processor.

    Raises:
        StartupError: llvmlite is not installed, or this processor cannot run the compiled functions.
    """

    def __init__(
        self,
        layout: Layout | PlainLayout,
        rows: Rows = Rows.FLOAT32,
        tilings: Tilings | None = None,
    ) -> None:
        self._layout, self._rows = layout, rows
        if (reason := why_unavailable()) is not None:
            raise StartupError(f"COROLLA_QUANTIZATION does not work here: {reason}. Set it to none.")
        tilings = tilings or (WIDE if processor_features().get("avx512f") else NARROW)
        source = module_source(layout, rows, packed_tiles=tilings.packed, plain_tiles=tilings.plain)
        self._compiled = Compiled(source)
        self._share = self._compiled.address("share")

    @property
    def part_address(self) -> int:
        """The address of the function `part` (see `module_source`), for other compiled functions."""
        return self._compiled.address("part")

    def multiply(self, rows: Tensor, panels: Tensor) -> Tensor:
        """The product `rows W^T`.

        Args:
            rows: `[R, in]` on the CPU, of any floating-point dtype; they are converted to the kernel's.
            panels: uint8 `[panels, blocks, bytes of a block]`, as `repack` or `lay_out` returns them.

        Returns:
            float32 `[R, 16 * panels]`.

        Raises:
            ValueError: rows and panels do not fit each other.
        """
        rows = rows.to(DTYPES[self._rows]).contiguous()
        num_rows, num_columns = rows.shape
        num_panels, num_blocks, _ = panels.shape
        if num_blocks * self._layout.block_weights != num_columns:
            raise ValueError(f"rows of {num_columns} numbers do not fit {num_blocks} blocks of {self._layout.name}")
        product = torch.empty(num_rows, num_panels * LANES, dtype=torch.float32)
        if not num_rows:
            return product
        are_many = num_rows * num_columns * num_panels * LANES >= LEAST_PRODUCTS_OF_THREADS
        num_threads = torch.get_num_threads() if are_many else 1
        # The panels of an item are a multiple of four, the most that are multiplied at once.
        size = -(-num_panels // (4 * num_threads)) * 4
        num_items = -(-num_panels // size)
        unpacks = not isinstance(self._layout, PlainLayout) and num_rows > MAX_FEW_ROWS
        num_scratch_bytes = scratch_bytes(num_columns, self._rows) if unpacks else 0
        scratch = torch.empty(num_items * num_scratch_bytes, dtype=torch.uint8)
        job = _Job(
            rows.data_ptr(), num_rows, num_columns, panels.data_ptr(), product.data_ptr(), num_panels,
            scratch.data_ptr(), num_scratch_bytes, size,
        )  # fmt: skip
        share(self._share, ctypes.addressof(job), num_items, num_threads)
        return product

    def expand(self, row_ids: Tensor, panels: Tensor, num_columns: int) -> Tensor:
        """Unpacks rows of the matrix to float32 `[R, in]`.

        Args:
            row_ids: int64 `[R]`, the numbers of the rows; they are not checked.
            panels: uint8 `[panels, blocks, bytes of a block]`.
            num_columns: the matrix's columns.
        """
        row_ids = row_ids.contiguous()
        rows = torch.empty(len(row_ids), num_columns, dtype=torch.float32)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        expand = ctypes.CFUNCTYPE(None, pointer, number, number, pointer, pointer)(self._compiled.address("expand"))
        expand(row_ids.data_ptr(), len(row_ids), num_columns, panels.data_ptr(), rows.data_ptr())
        return rows


def kernel_of(layout: Layout | PlainLayout, dtype: torch.dtype = torch.float32) -> Kernel:
    """The kernel for a layout and a dtype of hidden states, which the process makes once. Raises as `Kernel` does."""
    return _kernel(layout, rows_of(dtype))


def rows_of(dtype: torch.dtype) -> Rows:
    """The type of rows that kernels multiply for hidden states of a dtype."""
    return Rows.BFLOAT16 if dtype == torch.bfloat16 and _multiplies_pairs() else Rows.FLOAT32


def multiplied(
    layout: Layout | PlainLayout,
    rows: Tensor,
    panels: Tensor,
    num_outputs: int,
    bias: Tensor | None,
    order: Tensor | None = None,
) -> Tensor:
    """The product `rows W^T + b`, `[..., num_outputs]` in the dtype of the rows. Sums are float32.

    Args:
        layout: the layout of the panels.
        rows: `[..., in]` on the CPU.
        panels: uint8 `[panels, blocks, bytes of a block]`, as `repack` or `lay_out` returns them.
        num_outputs: how many rows the matrix has; the panels may have more.
        bias: `[num_outputs]` or None.
        order: int32 `[in]` or None, see `Panels`.
    """
    flat = rows if rows.dim() == 2 else rows.flatten(0, -2)
    if order is not None:
        flat = flat.index_select(1, order)
    product = kernel_of(layout, rows.dtype).multiply(flat, panels)
    if product.shape[1] != num_outputs:
        product = product[:, :num_outputs].contiguous()
    if bias is not None:
        product += bias
    product = product.to(rows.dtype)
    return product if rows.dim() == 2 else product.reshape(*rows.shape[:-1], num_outputs)


@functools.cache
def plain_layout(dtype: torch.dtype) -> PlainLayout | None:
    """The layout of plain weights of a dtype; None where no kernel multiplies by them."""
    if why_unavailable() is not None:
        return None
    return {torch.float32: PLAIN_FLOAT32, torch.bfloat16: PLAIN_BFLOAT16}.get(dtype)


@functools.cache
def _kernel(layout: Layout | PlainLayout, rows: Rows) -> Kernel:
    return Kernel(layout, rows)


@functools.cache
def _multiplies_pairs() -> bool:
    """This processor has instructions that multiply pairs of bfloat16 numbers."""
    return bool(processor_features().get("avx512bf16"))
