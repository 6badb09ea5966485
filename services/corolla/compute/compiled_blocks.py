"""Runs whole blocks of a span by compiled functions, on CPUs: one call runs all neighbouring blocks of one shape.

The call of a block with a mixture of experts ends before the mixture, whose router is the family's own.
"""

import ctypes
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from corolla.cache.store import KVStore
from corolla.compute.attention.base import AttentionBackend, AttentionBatch
from corolla.compute.attention.compiled_attention import (
    ELEMENTS,
    EXPONENTIAL,
    CompiledAttention,
    chunk_module,
    float_bits,
    jobs_of,
    next_token_module,
    tables_of,
)
from corolla.compute.base import Blocks, PackedStep, RowWork
from corolla.compute.fused_blocks import FusedBlocks
from corolla.compute.layer_trial import LayerTrial
from corolla.kernels.attention_text import HeadShape
from corolla.kernels.block_source import (
    GROUP,
    LAYER_BYTES,
    PLACE,
    PLACE_BYTES,
    PROJECTIONS,
    STEP,
    BlockShape,
    counter_bytes,
    module_source,
)
from corolla.kernels.compiler import Compiled, in_threads, max_sums, processor_features
from corolla.kernels.kernel_trial import try_kernel
from corolla.kernels.llvm_text import LANES
from corolla.kernels.product_source import scratch_bytes
from corolla.kernels.products import DTYPES, kernel_of, rows_of
from corolla.models.adapters.products import AdapterBatch, AdapterStacks, SpanAdapter
from corolla.models.fused import FusedLayer, FusedSpan, GatedMlp, MixtureMlp, Projection, RmsNorm
from corolla.models.linear import DenseLinear
from corolla.models.packed.modules import SILU, PackedLinear

log = logging.getLogger(__name__)

_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
"""The largest difference between a compiled block's output and that of its modules, relative to the largest number."""
_Step: Final = ctypes.c_int64 * len(STEP)
# The fields of a projection in a `LAYER`.
_PROJECTION_FIELDS: Final = 3
_GROUP_BYTES: Final = 8 * len(GROUP)
_END: Final = [name for _, name in STEP].index("end")
_COUNTERS: Final = [name for _, name in STEP].index("counters")


class CompiledBlocks(Blocks):
    """The compiled blocks of a span. Not thread-safe: one thread computes.

    Args:
        span: the blocks; their projections lie in panels, and `why_unsupported` returns None for them.
        dtype: the dtype of hidden states.
    """

    name: Final = "compiled"

    def __init__(self, span: FusedSpan, store: KVStore, dtype: torch.dtype, stacks: AdapterStacks) -> None:
        super().__init__(stacks, span.layers[0].device)
        self._span = span
        self._modules = FusedBlocks(span, stacks)
        # A mixture's own modules add adapters by hooks, which no compiled function calls.
        self.runs_adapters_apart = any(isinstance(layer.mlp, MixtureMlp) for layer in span.layers)
        self._store = store
        self._dtype = dtype
        self._shapes = [_shape_of(layer, dtype) for layer in span.layers]
        self._groups = sorted({store.group_of(index) for index in range(len(span.layers))})
        self._layers: Any = None
        self._kept: list[Tensor] = []
        self._places: WeakKeyDictionary[SpanAdapter, _Places] = WeakKeyDictionary()
        self._buffers = _Buffers(dtype, self._shapes)

    def adapters(self, rows: Sequence[RowWork]) -> list[SpanAdapter | None] | AdapterBatch | None:
        """The adapter of each token, or the batch for modules; see `Blocks.adapters`."""
        if all(row.adapter is None for row in rows):
            return None
        if self.runs_adapters_apart:
            return cast(AdapterBatch, super().adapters(rows))
        return [row.adapter for row in rows for _ in range(row.num_tokens)]

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. `hidden` is `[N, H]` on the CPU, and the step's store is the one of these blocks."""
        if isinstance(step.adapters, AdapterBatch):
            return self._modules.forward(step, hidden, layers)
        position_ids, adapters = step.position_ids, step.adapters or ()
        output = torch.empty(hidden.shape, dtype=self._dtype)
        output.copy_(hidden)
        # There is at most one; without one, no function reads a table.
        rotary = next(iter(self._span.rotaries), None)
        table, numbers = (output, None) if rotary is None else rotary.numbered(position_ids, step.end, output)
        if numbers is None:
            numbers = torch.arange(len(position_ids))
        # Only functions of such blocks read factors.
        factors = None if rotary is None else rotary.query_factors(position_ids, output)
        factors = numbers if factors is None else factors.float()
        buffers = self._buffers.of(len(hidden))
        if self._layers is None:
            self._layers = self._layer_fields()
        groups, kept = self._group_fields(layers, step.batch, buffers)
        of_tokens = (ctypes.c_int64 * len(adapters))(*map(self._places_of, adapters))
        num_threads = torch.get_num_threads()
        arguments = _Step(
            len(hidden), output.data_ptr(), buffers["normed"], buffers["product"], buffers["query"],
            buffers["attended"], buffers["input"], table.data_ptr(), numbers.data_ptr(), factors.data_ptr(),
            ctypes.addressof(groups), ctypes.addressof(of_tokens) if adapters else 0, 0,
            self._buffers.counters(), self._buffers.scratch(num_threads), self._buffers.scratch_bytes, num_threads,
            EXPONENTIAL.data_ptr(),
        )  # fmt: skip
        first = ctypes.addressof(self._layers)
        for shape, indices in self._calls(layers):
            arguments[_END] = first + (indices[-1] + 1) * LAYER_BYTES
            call = (ctypes.c_int64 * 3)(ctypes.addressof(arguments), first + indices[0] * LAYER_BYTES, 0)
            in_threads(_compiled(shape).address("team"), ctypes.addressof(call), num_threads)
            arguments[_COUNTERS] += counter_bytes(len(indices))
            layer = self._span.layers[indices[0]]
            if isinstance(layer.mlp, MixtureMlp):
                change = layer.mlp.forward(self._buffers.normed(len(hidden)), indices[0], None)
                output += change if layer.residual_multiplier == 1.0 else change * layer.residual_multiplier
        del kept
        return output

    def _calls(self, layers: Sequence[int]) -> Iterator[tuple[BlockShape, list[int]]]:
        """The layers that one call runs: all neighbours of one shape, or one with a mixture."""
        for shape, run in itertools.groupby(layers, key=self._shapes.__getitem__):
            indices = list(run)
            yield from ((shape, part) for part in ([indices] if shape.num_gated else [[each] for each in indices]))

    def _group_fields(
        self, layers: Sequence[int], batch: AttentionBatch, buffers: Mapping[str, int]
    ) -> tuple[Any, list[Any]]:
        """The `GROUP` fields of each group for this step, and the objects that must live as long as these fields."""
        fields = (ctypes.c_int64 * (len(GROUP) * len(self._groups)))()
        kept: list[Any] = []
        done: set[int] = set()
        for index in layers:
            group = self._store.group_of(index)
            if group in done:
                continue
            done.add(group)
            layer = self._span.layers[index]
            shape = _head_shape(layer, self._dtype)
            tables = tables_of(batch, index, layer.window, shape)
            keys, values = self._store.layer(index)
            next_tokens, chunks, states = jobs_of(
                tables, buffers["query"], keys, values, buffers["attended"], self._store.pool.page_tokens, shape,
                layer.scaling, layer.window,
            )  # fmt: skip
            slots = batch.slots(index, keys.device)
            kept += [tables, slots, next_tokens, chunks, states]
            jobs = (0 if job is None else ctypes.addressof(job) for job in (next_tokens, chunks))
            at = len(GROUP) * self._groups.index(group)
            counts = (len(tables.pieces), len(tables.queries), len(tables.blocks))
            fields[at : at + len(GROUP)] = [
                slots.data_ptr(), *jobs, *(count * layer.num_key_heads for count in counts),
            ]  # fmt: skip
        return fields, kept

    def _places_of(self, adapter: SpanAdapter | None) -> int:
        """The address of an adapter's `PLACE` fields; 0 for None."""
        if adapter is None:
            return 0
        known = self._places.get(adapter)
        if known is None:
            known = self._places[adapter] = _Places(adapter, self._span.layers)
        return known.address

    def _layer_fields(self) -> Any:
        fields: list[int] = []
        for index, layer in enumerate(self._span.layers):
            like = torch.empty(0, layer.num_key_heads, layer.head_dim, dtype=self._dtype)
            keys, values = self._store.layer_like(index, like, like)
            heads = _head_shape(layer, self._dtype)
            group = self._groups.index(self._store.group_of(index))
            strides = (*keys.stride()[:2], *values.stride()[:2])
            fields += (
                index * len(PROJECTIONS) * PLACE_BYTES, group * _GROUP_BYTES, keys.data_ptr(), values.data_ptr(),
                *(stride * keys.element_size() for stride in strides),
                next_token_module(heads).address("piece"), next_token_module(heads).address("merge"),
                chunk_module(heads).address("block"),
            )  # fmt: skip
            for norm in _norms(layer):
                fields += self._norm_fields(norm)
            projections = _projections(layer)
            for projection in projections:
                kernel = kernel_of(projection.layout, self._dtype)
                fields += (kernel.part_address, projection.panels.data_ptr(), self._float32(projection.bias))
            fields += [0] * (_PROJECTION_FIELDS * (len(PROJECTIONS) - len(projections)))
        return (ctypes.c_int64 * len(fields))(*fields)

    def _norm_fields(self, norm: Any) -> tuple[int, int]:
        return (0, 0) if norm is None else (self._float32(norm.weight), float_bits(norm.epsilon))

    def _float32(self, tensor: Tensor | None) -> int:
        """The address of the tensor's numbers in float32, if need be in a copy; 0 for None."""
        if tensor is None:
            return 0
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()


def choose_compiled_blocks(
    span: FusedSpan, store: KVStore, backend: AttentionBackend, dtype: torch.dtype, stacks: AdapterStacks
) -> CompiledBlocks | None:
    """Compiles the blocks if the span, the store and the attention allow it, and checks one layer of each shape.

    Args:
        span: the fused blocks.
        store: the store of keys and values.
        backend: the attention; blocks are compiled only with `CompiledAttention`.
        dtype: the dtype of hidden states.
        stacks: the stacked copies of adapters, for spans with mixtures.

    Returns:
        The compiled blocks; None if they cannot be compiled, or a result differs too much.
    """
    if not isinstance(backend, CompiledAttention):
        return None
    reason = why_unsupported(span, store, dtype)
    if reason is None:
        first_layers = {_shape_of(layer, dtype): index for index, layer in reversed(list(enumerate(span.layers)))}
        trials = (_failed_trial(span.layers[index], dtype, store) for index in first_layers.values())
        reason = next(filter(None, trials), None)
        if reason is None:
            log.info("running compiled blocks", extra={"shapes": len(first_layers)})
            return CompiledBlocks(span, store, dtype, stacks)
    log.info("running blocks without compiled functions", extra={"reason": reason})
    return None


def why_unsupported(span: FusedSpan, store: KVStore, dtype: torch.dtype) -> str | None:
    """The reason why the blocks of a span cannot be compiled; None if they can."""
    if dtype not in _TOLERANCES or store.codec is not None or store.pool.page_tokens % LANES:
        return "hidden states, keys or values are of a type, or pages of a size, that no function is made for"
    if len({(each.num_heads, each.num_key_heads, each.head_dim, each.scaling) for each in span.layers}) > 1:
        return "the heads of its layers differ"  # a job serves all layers of a group
    if len(span.rotaries) > 1:
        return "its layers rotate by several tables"
    return next((found for layer in span.layers if (found := _why_unsupported(layer, dtype)) is not None), None)


def _why_unsupported(layer: FusedLayer, dtype: torch.dtype) -> str | None:
    if isinstance(layer.mlp, GatedMlp) and (not layer.mlp.gates or type(layer.mlp.activation).__name__ not in SILU):
        return f"the activation {type(layer.mlp.activation).__name__}, or an MLP without a gate, has no function"
    if not all(isinstance(norm, RmsNorm | None) for norm in _norms(layer)):
        return "a norm is not the usual one"
    of_outputs = (layer.output_norm, layer.mlp_output_norm)
    if layer.attention_norm is None or layer.mlp_norm is None or any(norm is not None for norm in of_outputs):
        return "norms stand elsewhere than before attention and MLP"
    if layer.softcap is not None or layer.sinks is not None or layer.gate is not None:
        return "bounds of scores, sinks and gates of attention have no function"
    if any(each is not None and each.weight.shape != (layer.head_dim,) for each in (layer.query_norm, layer.key_norm)):
        return "queries and keys are normalised over all heads"
    if (layer.query_norm is None) != (layer.key_norm is None):
        return "of queries and keys only one is normalised"
    if not all(map(_lies_in_panels, _projections(layer))):
        return "not all weights lie in panels"
    shape = _shape_of(layer, dtype)
    rotated = shape.rotary_size if shape.rotates_pairs else shape.rotary_size // 2
    if any(size % LANES for size in (layer.head_dim, rotated, layer.hidden_size, shape.num_gated)):
        return "a size is not a multiple of 16"
    return None


def _norms(layer: FusedLayer) -> tuple[Any, ...]:
    return layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm


def _lies_in_panels(projection: Projection) -> bool:
    if not isinstance(projection, DenseLinear | PackedLinear) or projection.layout is None:
        return False
    # Only modules put inputs into another order of columns.
    return projection.panels is not None and getattr(projection, "order", None) is None


def _projections(layer: FusedLayer) -> list[Any]:
    """Returns the layer's projections in the order of `PROJECTIONS`; a mixture lacks the last two."""
    own, mlp = [layer.query_key_value, layer.output], layer.mlp
    return [*own, mlp.gate_up, mlp.down] if isinstance(mlp, GatedMlp) else own


def _shape_of(layer: FusedLayer, dtype: torch.dtype) -> BlockShape:
    rotary, like = layer.rotary, torch.empty(0, dtype=dtype)
    table = like if rotary is None else rotary.numbered(torch.zeros(1, dtype=torch.int64), 1, like)[0]
    return BlockShape(
        element=ELEMENTS[dtype],
        hidden_size=layer.hidden_size,
        num_heads=layer.num_heads,
        num_key_heads=layer.num_key_heads,
        head_size=layer.head_dim,
        num_gated=layer.mlp.num_gated if isinstance(layer.mlp, GatedMlp) else 0,
        has_bias=tuple(projection.bias is not None for projection in _projections(layer)),
        norms_heads=layer.query_norm is not None,
        norms_rotated=layer.norms_rotated,
        rotary_size=0 if rotary is None else rotary.size,
        rotates_pairs=rotary is not None and rotary.in_pairs,
        rotary_element=ELEMENTS[table.dtype],
        scales_queries=rotary is not None and rotary.scales_queries,
        residual_multiplier=layer.residual_multiplier,
        multiplied=rows_of(dtype).value,
    )


def _head_shape(layer: FusedLayer, dtype: torch.dtype) -> HeadShape:
    num_shared = layer.num_heads // layer.num_key_heads
    return HeadShape(ELEMENTS[dtype], layer.head_dim, layer.head_dim, num_shared, max_sums())


@functools.cache
def _compiled(shape: BlockShape) -> Compiled:
    """The compiled module for a shape, made once in the process."""
    return Compiled(module_source(shape, pauses="avx" in processor_features()))


class _Places:
    """The `PLACE` fields of an adapter, by which compiled functions find the adapter's tensors."""

    def __init__(self, adapter: SpanAdapter, layers: Sequence[FusedLayer]) -> None:
        fields: list[int] = []
        self._kept: list[Tensor] = []
        # Only spans without mixtures get here.
        places = [(index, place) for index, layer in enumerate(layers) for place in layer.own_places]
        for index, place in places:
            products = adapter.places.get((index, place))
            own = [] if products is None else [self._address(products.down), len(products.products)]
            for each in () if products is None else products.products:
                own += (self._address(each.up), *each.up.shape, each.first_column)
            fields += own + [0] * (len(PLACE) - len(own))
        self._fields = (ctypes.c_int64 * len(fields))(*fields)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._fields)

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


class _Buffers:
    """The work memory of blocks; it grows with the largest number of tokens in a call."""

    def __init__(self, dtype: torch.dtype, shapes: Sequence[BlockShape]) -> None:
        self._num_tokens = 0
        self._dtype = dtype
        sizes = [shape.sizes for shape in shapes]
        rows = rows_of(dtype)
        multiplied = DTYPES[rows]
        self._widths = {
            "normed": (max(shape.hidden_size for shape in shapes), multiplied),
            "product": (max(outputs for each in sizes for _, outputs in each.values()), torch.float32),
            "query": (max(each["output"][0] for each in sizes), dtype),
            "attended": (max(each["output"][0] for each in sizes), torch.float32),
            "input": (
                max(max(each["output"][0], shape.num_gated) for each, shape in zip(sizes, shapes, strict=True)),
                multiplied,
            ),
        }
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        # Each call needs counters of its own; in the worst case, each layer has a call of its own.
        self._counters = torch.empty(len(shapes) * counter_bytes(1), dtype=torch.uint8)
        self.scratch_bytes = max(scratch_bytes(inputs, rows) for each in sizes for inputs, _ in each.values())

    def of(self, num_tokens: int) -> Mapping[str, int]:
        """The buffers' addresses by name, with room for `num_tokens`."""
        if num_tokens > self._num_tokens:
            self._num_tokens = 1 << (num_tokens - 1).bit_length()
            self._tensors.clear()
            for name, (width, dtype) in self._widths.items():
                self._tensors[name] = torch.empty(self._num_tokens, width, dtype=dtype)
            self._places = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        return self._places

    def normed(self, num_tokens: int) -> Tensor:
        """What the last call has normalised for its MLP, `[num_tokens, H]` in the dtype of hidden states."""
        return self._tensors["normed"][:num_tokens].to(self._dtype)

    def counters(self) -> int:
        """The address of the counters of all phases, set to zero."""
        return self._counters.zero_().data_ptr()

    def scratch(self, num_threads: int) -> int:
        """The address of the scratch memory of products, for `num_threads` threads."""
        if self._scratch.numel() < num_threads * self.scratch_bytes:
            self._scratch = torch.empty(num_threads * self.scratch_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()


@torch.inference_mode()
def _failed_trial(layer: FusedLayer, dtype: torch.dtype, store: KVStore) -> str | None:
    """Runs a layer in all cuts. Returns what failed, as a sentence's end, or None.

    Attention gives a single token other bits than a chunk, so all cuts are near the modules' outputs, and no more.
    """
    trial = LayerTrial.of_fused(
        layer, lambda part, own: CompiledBlocks(part, own, dtype, AdapterStacks()), CompiledAttention(),
        store.pool.page_tokens, dtype,
    )  # fmt: skip
    for cut in trial.cuts:
        if (failure := try_kernel(trial.run, (cut,), trial.error, _TOLERANCES[dtype]).failure) is not None:
            return failure
    return None
