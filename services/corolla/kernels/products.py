"""Compiles what multiplies by panels of weights for the processor that it runs on, once in a process for each layout.

llvmlite brings the compiler; where the server runs, there need be none. It takes a fifth of a second.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from corolla.chassis.errors import StartupError
from corolla.kernels.compiler import Compiled, objection, processor_features, share
from corolla.kernels.layouts import PLAIN_BFLOAT16, PLAIN_FLOAT32, Layout, PlainLayout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.product_source import JOB, MAX_FEW_ROWS, Rows, Tiles, module_source, scratch_bytes


@dataclass(frozen=True, slots=True)
class Tilings:
    """What is multiplied at once by weights that are unpacked meanwhile, and by plain ones: sums, weights and an input
    fit the registers."""

    packed: Tiles
    plain: Tiles


WIDE: Final = Tilings(
    packed=((8, 2), (8, 1), (4, 4), (4, 2), (4, 1), (2, 4), (2, 2), (2, 1), (1, 4), (1, 1)),
    plain=((6, 4), (6, 2), (6, 1), (4, 4), (4, 2), (4, 1), (2, 4), (2, 2), (2, 1), (1, 4), (1, 1)),
)
"""For 32 registers of 16 numbers."""
NARROW: Final = Tilings(
    packed=((4, 1), (2, 2), (2, 1), (1, 2), (1, 1)),
    plain=((6, 1), (4, 1), (3, 1), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)),
)
"""For smaller registers, or fewer."""
DTYPES: Final = {Rows.FLOAT32: torch.float32, Rows.BFLOAT16: torch.bfloat16}
_Job: Final = ctypes.c_int64 * len(JOB)
LEAST_PRODUCTS_OF_THREADS: Final = 1 << 19
"""Fewer products take less time than it takes to wake another thread."""


class Kernel:
    """Multiplies by matrices of one layout.

    Args:
        rows: of float32 or of bfloat16; those of plain weights in float32 are of float32.
        tilings: None: those that this processor has registers for; the results are the same in every bit.
        is_ordered: whether columns are for inputs in another order.

    Raises:
        StartupError: llvmlite is not installed, or this processor cannot run what it makes.
    """

    def __init__(
        self,
        layout: Layout | PlainLayout,
        rows: Rows = Rows.FLOAT32,
        tilings: Tilings | None = None,
        *,
        is_ordered: bool = False,
    ) -> None:
        self._layout, self._rows, self._is_ordered = layout, rows, is_ordered
        if (reason := objection()) is not None:
            raise StartupError(f"COROLLA_QUANTIZATION=packed does not work here: {reason}. Set it to none.")
        tilings = tilings or (WIDE if processor_features().get("avx512f") else NARROW)
        source = module_source(
            layout, rows, packed_tiles=tilings.packed, plain_tiles=tilings.plain, is_ordered=is_ordered
        )
        self._compiled = Compiled(source)
        self._share = self._compiled.address("share")

    @property
    def part_address(self) -> int:
        """Of `part`, see `module_source`, for other compiled functions."""
        return self._compiled.address("part")

    def multiply(self, rows: Tensor, panels: Tensor, order: Tensor | None = None) -> Tensor:
        """`rows W^T`.

        Args:
            rows: `[R, in]`, of any type; they are converted to that of the kernel.
            panels: as `repack` gives them.
            order: see `Panels`; None unless the kernel is for some.

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
        if (order is not None) != self._is_ordered or (order is not None and len(order) != num_columns):
            raise ValueError(f"an order does not fit {num_columns} columns")
        weights = weights_of(panels, order)
        product = torch.empty(num_rows, num_panels * LANES, dtype=torch.float32)
        if not num_rows:
            return product
        are_many = num_rows * num_columns * num_panels * LANES >= LEAST_PRODUCTS_OF_THREADS
        num_threads = torch.get_num_threads() if are_many else 1
        # In fours, which are multiplied at once.
        size = -(-num_panels // (4 * num_threads)) * 4
        num_items = -(-num_panels // size)
        unpacks = not isinstance(self._layout, PlainLayout) and num_rows > MAX_FEW_ROWS
        num_scratch_bytes = scratch_bytes(num_columns, self._rows) if unpacks else 0
        scratch = torch.empty(num_items * num_scratch_bytes, dtype=torch.uint8)
        job = _Job(
            rows.data_ptr(), num_rows, num_columns, weights.data_ptr(), product.data_ptr(), num_panels,
            scratch.data_ptr(), num_scratch_bytes, size,
        )  # fmt: skip
        share(self._share, ctypes.addressof(job), num_items, num_threads)
        return product

    def expand(self, row_ids: Tensor, panels: Tensor, num_columns: int) -> Tensor:
        """Rows of the matrix, float32 `[R, in]`, by their int64 `[R]` numbers, which must be within it."""
        row_ids = row_ids.contiguous()
        rows = torch.empty(len(row_ids), num_columns, dtype=torch.float32)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        expand = self._compiled.function("expand", pointer, number, number, pointer, pointer)
        expand(row_ids.data_ptr(), len(row_ids), num_columns, panels.data_ptr(), rows.data_ptr())
        return rows


def kernel_of(layout: Layout | PlainLayout, dtype: torch.dtype = torch.float32, *, is_ordered: bool = False) -> Kernel:
    """The process's only one for a layout and a type of hidden states. Raises as `Kernel`."""
    return _kernel(layout, rows_of(dtype), is_ordered)


def weights_of(panels: Tensor, order: Tensor | None) -> Tensor:
    """What `part` is given as weights: the panels, or where the order and they lie."""
    return panels if order is None else torch.tensor([order.data_ptr(), panels.data_ptr()], dtype=torch.int64)


def rows_of(dtype: torch.dtype) -> Rows:
    """What kernels multiply, of hidden states of a type."""
    return Rows.BFLOAT16 if dtype == torch.bfloat16 and _multiplies_pairs() else Rows.FLOAT32


def multiplied(
    layout: Layout | PlainLayout,
    rows: Tensor,
    panels: Tensor,
    num_outputs: int,
    bias: Tensor | None,
    order: Tensor | None = None,
) -> Tensor:
    """`rows W^T + b` in the type of the rows: `[..., in]` to `[..., num_outputs]`. Sums are float32.

    Args:
        panels: as `repack` or `lay_out` gives them.
        bias: `[num_outputs]` or None.
        order: see `Panels`.
    """
    flat = rows if rows.dim() == 2 else rows.flatten(0, -2)
    product = kernel_of(layout, rows.dtype, is_ordered=order is not None).multiply(flat, panels, order)
    if product.shape[1] != num_outputs:
        product = product[:, :num_outputs].contiguous()
    if bias is not None:
        product += bias
    product = product.to(rows.dtype)
    return product if rows.dim() == 2 else product.reshape(*rows.shape[:-1], num_outputs)


@functools.cache
def plain_layout(dtype: torch.dtype) -> PlainLayout | None:
    """How plain weights of a type are laid out for a kernel; None where there is none."""
    if objection() is not None:
        return None
    return {torch.float32: PLAIN_FLOAT32, torch.bfloat16: PLAIN_BFLOAT16}.get(dtype)


@functools.cache
def _kernel(layout: Layout | PlainLayout, rows: Rows, is_ordered: bool) -> Kernel:
    return Kernel(layout, rows, is_ordered=is_ordered)


@functools.cache
def _multiplies_pairs() -> bool:
    """Whether this processor has instructions for pairs of bfloat16."""
    return bool(processor_features().get("avx512bf16"))
