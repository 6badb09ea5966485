"""Runs the chosen experts of a mixture by one call of a compiled function, on CPUs."""

import ctypes
import functools
from typing import Final, NamedTuple

import torch
from torch import Tensor

from corolla.kernels.attention_text import CONSTANTS
from corolla.kernels.compiler import Compiled, in_threads, processor_features
from corolla.kernels.expert_source import CALL, COUNTERS_BYTES, ExpertShape, module_source
from corolla.kernels.layouts import Layout, PlainLayout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.phase_source import PIECES_OF_THREAD
from corolla.kernels.product_source import scratch_bytes
from corolla.kernels.products import DTYPES, LEAST_PRODUCTS_OF_THREADS, kernel_of, rows_of

_ELEMENTS: Final = {torch.float32: "float", torch.bfloat16: "bfloat"}
_Call: Final = ctypes.c_int64 * len(CALL)
_CONSTANTS: Final = torch.tensor(CONSTANTS, dtype=torch.float32)


class ExpertPanels(NamedTuple):
    """The weights of one product of all experts.

    Attributes:
        layout: the layout of the panels.
        panels: uint8 `[experts * panels of an expert, blocks, bytes of a block]` on the CPU, those of one expert after
            those of another.
        num_outputs: how many outputs an expert has.
    """

    layout: Layout | PlainLayout
    panels: Tensor
    num_outputs: int


def can_run(dtype: torch.dtype, hidden_size: int, num_gated: int) -> bool:
    """There are compiled functions for hidden states of this dtype, and experts of these sizes."""
    return dtype in _ELEMENTS and hidden_size % LANES == 0 and num_gated % LANES == 0


def run_experts(hidden: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertPanels, down: ExpertPanels) -> Tensor:
    """Runs the chosen experts of each token, which `can_run` allows. Their gates have the activation SiLU.

    Args:
        hidden: `[N, H]`, on the CPU.
        ids: int64 `[N, chosen]`, the experts of each token.
        weights: `[N, chosen]`, the factors of their results.
        gate_up: the weights `[experts, 2 G, H]`.
        down: the weights `[experts, H, G]`.

    Returns:
        `[N, H]` in the dtype of `hidden`.
    """
    (num_tokens, hidden_size), num_chosen, num_gated = hidden.shape, ids.shape[1], gate_up.num_outputs // 2
    rows = rows_of(hidden.dtype)
    multiplied = DTYPES[rows]
    order, places, experts, firsts = _grouped(ids.flatten())
    num_pairs, num_hits = len(order), len(experts)
    given = hidden.to(multiplied).contiguous()
    factors = weights.float().contiguous()
    gathered = torch.empty(num_pairs, hidden_size, dtype=multiplied)
    product = torch.empty(num_pairs * max(hidden_size, 2 * num_gated), dtype=torch.float32)
    gated = torch.empty(num_pairs, num_gated, dtype=multiplied)
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    are_many = num_pairs * hidden_size * num_gated >= LEAST_PRODUCTS_OF_THREADS
    num_threads = torch.get_num_threads() if are_many else 1
    of_products: list[int] = []
    for each in (gate_up, down):
        num_panels = each.num_outputs // LANES
        # A piece has a multiple of four panels, since a product multiplies up to four at once.
        fours = -(-num_panels * num_hits // (4 * num_threads * PIECES_OF_THREAD))
        size = num_panels if num_threads == 1 else min(num_panels, 4 * max(1, fours))
        num_bytes = num_panels * each.panels[0].nbytes
        part = kernel_of(each.layout, hidden.dtype).part_address
        of_products += (part, each.panels.data_ptr(), num_bytes, size)
    num_scratch_bytes = max(scratch_bytes(columns, rows) for columns in (hidden_size, num_gated))
    counters = torch.zeros(COUNTERS_BYTES, dtype=torch.uint8)
    scratch = torch.empty(num_threads * num_scratch_bytes, dtype=torch.uint8)
    tensors = (given, order, places, experts, firsts, factors, gathered, product, gated, output)
    call = _Call(
        num_tokens, num_chosen, num_pairs, num_hits, *(each.data_ptr() for each in tensors), *of_products,
        counters.data_ptr(), scratch.data_ptr(), num_scratch_bytes, 0, _CONSTANTS.data_ptr(),
    )  # fmt: skip
    shape = ExpertShape(_ELEMENTS[hidden.dtype], rows.value, hidden_size, num_gated)
    in_threads(_module(shape).address("team"), ctypes.addressof(call), num_threads)
    return output


def _grouped(ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The order of pairs by their experts, and what else `CALL` has of it: all int64, on the CPU.

    Args:
        ids: int64 `[pairs]`, the expert of each pair.
    """
    order = ids.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    experts, counts = torch.unique_consecutive(ids[order], return_counts=True)
    firsts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return order, places, experts, firsts


@functools.cache
def _module(shape: ExpertShape) -> Compiled:
    return Compiled(module_source(shape, pauses="avx" in processor_features()))
