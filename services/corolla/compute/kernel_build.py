"""Compiles the Triton kernels of a model's blocks and head before a server of it starts, without a device."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corolla.cache.codecs import CODECS
from corolla.cache.store import KVStore
from corolla.chassis.errors import StartupError
from corolla.compute.attention.base import AttentionBatch
from corolla.compute.attention.paged_triton import PagedTriton
from corolla.compute.base import PackedStep, RecordableBlocks
from corolla.compute.low_rank import RECORDED_RANK, LowRankBatch, LowRankTable
from corolla.compute.reference import FamilyRows
from corolla.compute.state_kernels import StateKernels, are_known, why_no_kernels
from corolla.compute.triton_blocks import TritonBlocks, stored_twice, why_no_kernel
from corolla.kernels.page_tables import PageTables
from corolla.kernels.state_rows import StateRows
from corolla.kernels.triton.availability import is_interpreted, missing
from corolla.kernels.triton.compilation import SHARED_MEMORY, Compilation, compiling
from corolla.models.adapters.products import AdapterStacks
from corolla.models.checkpoint import Checkpoint
from corolla.models.families import key_shapes, pageless_layers, recurrent_layers
from corolla.models.invariant import InvariantProduct, triton_product
from corolla.models.mixtures import Mixture
from corolla.models.span_model import SpanModel, empty_span
from corolla.wire.span import Span

_META = torch.device("meta")


def build_kernels(
    checkpoint: Checkpoint,
    archs: list[int],
    dtype: torch.dtype,
    page_tokens: int,
    kv_cache_dtype: str = "auto",
    quantization: str = "none",
) -> Iterator[Compilation]:
    """Compiles the kernels of all blocks and of the head, for single tokens and for chunks.

    Args:
        checkpoint: the model; its weights are not read.
        archs: compute capabilities without the point, such as 90.
        dtype: the dtype of weights and hidden states.
        page_tokens: tokens of a page.
        kv_cache_dtype: how keys and values are stored; see `SpanRunner`.
        quantization: see `load_span`.

    Yields:
        What was compiled for each architecture.

    Raises:
        StartupError: triton is not installed or interprets kernels, an architecture is unknown, or the family's own
            code runs the blocks.
    """
    if is_interpreted():
        raise StartupError("TRITON_INTERPRET is set, so Triton compiles nothing; unset it.")
    if (lack := missing()) is not None:
        raise StartupError(f"Kernels cannot be compiled: {lack}.")
    if unknown := sorted(set(archs) - SHARED_MEMORY.keys()):
        raise StartupError(
            f"Kernels cannot be compiled for {unknown[0]}: choose from {', '.join(map(str, SHARED_MEMORY))}."
        )
    model, blocks = _blocks(checkpoint, dtype, quantization)
    for arch in archs:
        with compiling(arch) as compilation:
            _run(model, blocks, checkpoint, dtype, page_tokens, kv_cache_dtype)
        yield compilation


def _blocks(checkpoint: Checkpoint, dtype: torch.dtype, quantization: str) -> tuple[SpanModel, RecordableBlocks]:
    """All blocks without weights, which multiply by the Triton kernels."""
    whole = Span(0, checkpoint.num_blocks)
    model = SpanModel(empty_span(checkpoint, whole, dtype, quantization), whole, checkpoint.family)
    model.make_fused()
    for linear in model.linears:
        linear.invariant = InvariantProduct("triton", triton_product, (1,))
    if model.fused is None:
        if not are_known(model):
            raise StartupError(f"There is nothing to compile: {checkpoint.name} runs with its family's own code.")
        failures, stacks = [why_no_kernels(model)], AdapterStacks()
        blocks: RecordableBlocks = StateKernels(model, stacks, FamilyRows(model, stacks))
    else:
        failures = [why_no_kernel(layer, dtype) for layer in model.fused.layers]
        blocks = TritonBlocks(model.fused)
    if (failure := next(filter(None, failures), None)) is not None:
        raise StartupError(f"There is nothing to compile for {checkpoint.name}: {failure}.")
    return model, blocks


@torch.inference_mode()
def _run(
    model: SpanModel,
    blocks: RecordableBlocks,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    page_tokens: int,
    kv_cache_dtype: str,
) -> None:
    from corolla.kernels.triton.choice_launches import draw_tokens
    from corolla.kernels.triton.launches import row_counts

    backend, config = PagedTriton(), model.config
    codec = CODECS[kv_cache_dtype](dtype) if kv_cache_dtype != "auto" else None
    store = KVStore(
        1, page_tokens, model.windows, codec=codec, recurrent=recurrent_layers(config),
        pageless=pageless_layers(config), key_shapes=key_shapes(config),
    )  # fmt: skip
    if store.recurrent:
        store.use_state_table()
    if codec is not None and model.fused is not None:
        for layer in model.fused.layers:
            num_outputs = (layer.num_heads + 2 * layer.num_key_heads) * layer.head_dim
            stored_twice(codec, layer, torch.empty(1, num_outputs, dtype=dtype, device=_META))
    head = torch.empty(checkpoint.vocab_size, checkpoint.hidden_size, dtype=dtype, device=_META)
    groups, table = range(len(store.rules)), LowRankTable(blocks.num_layers, _META)
    scores = torch.empty(1, checkpoint.vocab_size, device=_META)
    numbers = torch.empty(1, dtype=torch.int64, device=_META)
    draw_tokens(scores, numbers, numbers, numbers, torch.empty(1, device=_META))
    for num_rows in sorted({*row_counts(), *_tokens_of_mixtures(model, row_counts())}):
        hidden = torch.empty(num_rows, checkpoint.hidden_size, dtype=dtype, device=_META)
        triton_product(hidden, head, None)
        positions = torch.empty(num_rows, dtype=torch.int64, device=_META)
        adapters = LowRankBatch(table, torch.empty(num_rows, 3, dtype=torch.int32, device=_META), RECORDED_RANK)
        integers = torch.empty(num_rows + 1, dtype=torch.int32, device=_META)
        # A step of single tokens, and one chunk.
        for max_queries in (1, num_rows):
            tables = _tables(num_rows // max_queries, max_queries, page_tokens)
            batch = AttentionBatch(
                store, (), backend, slots=dict.fromkeys(groups, positions), prepared=dict.fromkeys(groups, (tables,))
            )
            states = None
            if store.recurrent:
                sources, first_tokens = positions[: num_rows // max_queries], integers[: num_rows // max_queries + 1]
                states = StateRows(sources, sources, first_tokens, integers[:num_rows])
            step = PackedStep((), positions, 1, batch, None if model.fused is None else adapters, states)
            blocks.forward(step, hidden, range(blocks.num_layers))


def _tokens_of_mixtures(model: SpanModel, row_counts: Sequence[int]) -> Iterator[int]:
    """Numbers of tokens for which an expert gets as many of them, on average, as each tile is made for."""
    for module in model.modules():
        if (mixture := Mixture.from_module(module)) is not None:
            routing = mixture.routing
            yield from (-(-count * routing.num_experts // routing.num_chosen) for count in row_counts)


def _tables(num_rows: int, max_queries: int, page_tokens: int) -> PageTables:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=_META)

    return PageTables(
        first_queries=integers(num_rows + 1),
        first_pages=integers(num_rows),
        num_keys=integers(num_rows),
        pages=integers(num_rows, 1),
        max_queries=max_queries,
        num_pages=num_rows,
        page_tokens=page_tokens,
    )
