"""Runs whole blocks of a span by Triton kernels, on GPUs: a token's bits do not depend on the rest of the batch.

`FusedSpan` has the blocks, and their projections multiply by the rule (`models/invariant`). The kernels of
`expert_launches` take the place of a mixture of experts, whose own code waits for the device. A server takes the
kernels only where a trial at start finds that their results equal those of the blocks' modules up to rounding, and that
the same tokens have the same bits as a chunk, in several chunks, one by one, and next to another session.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, ReLUSquaredActivation, SiLUActivation

from corolla.cache.codecs import KVCodec
from corolla.cache.store import KVStore
from corolla.compute.attention.base import AttentionBackend, LayerInput
from corolla.compute.attention.paged_triton import PagedTriton, attend_stored
from corolla.compute.base import PackedStep, RecordableBlocks, RowWork
from corolla.compute.layer_trial import LayerTrial
from corolla.compute.low_rank import LowRankBatch, LowRankTable, choose_low_rank_table
from corolla.kernels.kernel_trial import failure_of, try_kernel
from corolla.kernels.product_choice import rung_of
from corolla.models.adapters.products import AdapterBatch, AdapterStacks
from corolla.models.fused import FusedLayer, FusedSpan, GatedMlp, HeadNorm, MixtureMlp, Projection, RmsNorm
from corolla.models.invariant import Norm
from corolla.models.linear import DenseLinear
from corolla.models.mixtures import Mixture, NeighbourGate, failed_mixture_trial, multiply_experts
from corolla.models.packed.modules import PackedLinear
from corolla.models.rotary_table import RotaryTable

if TYPE_CHECKING:
    from corolla.kernels.triton.launches import HeadNorms

log = logging.getLogger(__name__)

TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""The largest difference between a block's output and that of its modules, relative to the largest number."""
CODED_TOLERANCE: Final = 2e-2
"""The same with keys and values in eight bits: where modules round in another way, a number may get the next code."""
SHORT_STEP: Final = 256
"""Steps of up to so many tokens read weights for longer than they multiply."""

# Powers of two, up and down, that the numbers of the tokens of a trial of codes are multiplied by.
_CODED_TOKENS: Final = 12


def norm_of(norm: Any) -> Norm | None:
    """Returns a layer's norm as the kernels take it, or None if the layer has none or no kernel computes it."""
    return Norm.from_module(norm.module if isinstance(norm, RmsNorm | HeadNorm) else norm)


def activation_of(module: nn.Module) -> str | None:
    """The name of an activation among `launches.ACTIVATIONS`; None: the kernels do not have it."""
    if isinstance(module, nn.SiLU | SiLUActivation):
        return "silu"
    if isinstance(module, GELUTanh | NewGELUActivation) or (
        isinstance(module, nn.GELU) and module.approximate == "tanh"
    ):
        return "gelu_tanh"
    if isinstance(module, ReLUSquaredActivation):
        return "relu2"
    return "gelu" if isinstance(module, nn.GELU | GELUActivation) else None


@dataclass(frozen=True, slots=True)
class _Plan:
    """A layer as the kernels take it."""

    layer: FusedLayer
    attention_norm: Norm | None
    output_norm: Norm | None
    mlp_norm: Norm | None
    mlp_output_norm: Norm | None
    head_norms: "HeadNorms | None"
    mlp: "_GatedPlan | MixturePlan"


class _GatedPlan:
    """An MLP as the kernels take it."""

    def __init__(self, mlp: GatedMlp) -> None:
        self._mlp = mlp
        self._activation = activation_of(mlp.activation)

    def forward(self, normed: Tensor, index: int, adapters: AdapterBatch | LowRankBatch | None) -> Tensor:
        from corolla.kernels.triton.launches import activate, gate

        gate_up = self._mlp.gate_up.forward(normed)
        if adapters is not None:
            adapters.add(index, self._mlp.places[0], normed, gate_up)
        if self._activation is None:
            # A function of single numbers; the trial finds out if it is another one.
            gated = self._mlp.gated(gate_up)
        else:
            gated = (gate if self._mlp.gates else activate)(gate_up, self._activation)
        delta = self._mlp.down.forward(gated)
        if adapters is not None:
            adapters.add(index, self._mlp.places[1], gated, delta)
        return delta


class MixturePlan:
    """A mixture of experts as the kernels take it."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        gate = mixture.activation
        self._neighbours = gate if isinstance(gate, NeighbourGate) else None
        self._activation = "" if isinstance(gate, NeighbourGate) else cast(str, activation_of(gate))
        shared = mixture.shared
        self._shared_activation = None if shared is None else activation_of(shared.act_fn)

    def forward(self, normed: Tensor, _index: int, _adapters: AdapterBatch | LowRankBatch | None) -> Tensor:
        """Runs the mixture over the new tokens of all rows.

        Args:
            normed: `[N, H]`, in the model's dtype, on its device.

        Returns:
            `[N, H]` in the same dtype.
        """
        from corolla.kernels.triton.expert_launches import add_experts, choose_experts
        from corolla.kernels.triton.launches import gate, gate_neighbours, multiply

        mixture, shared = self._mixture, self._mixture.shared
        if mixture.router is not None:
            logits = mixture.router(normed)
        else:
            weight = cast(Tensor, mixture.router_weight)
            logits = multiply(normed.float() if mixture.is_wide else normed, weight, mixture.router_bias)
        dtype = normed.dtype if mixture.rounds_weights else torch.float32
        chosen = choose_experts(logits, mixture.routing, mixture.correction, dtype)
        gate_up = multiply_experts(normed, mixture.gate_up, chosen, mixture.gate_up_bias)
        if self._neighbours is None:
            gated = gate(gate_up, self._activation)
        else:
            gated = gate_neighbours(gate_up, self._neighbours.alpha, self._neighbours.limit)
        results = multiply_experts(gated, mixture.down, chosen, mixture.down_bias)
        if shared is None:
            return add_experts(results, chosen)
        # Calls of modules, not of their method `forward`, run the hooks that add what adapters change.
        own = gate(shared.gate_proj(normed), cast(str, self._shared_activation), shared.up_proj(normed))
        opening = None if mixture.shared_gate is None else mixture.shared_gate(normed)
        return add_experts(results, chosen, shared.down_proj(own), opening)


def why_unsupported(layer: FusedLayer, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run a layer, as a sentence's end; None: they can."""
    if not all(map(_keeps_rows_apart, layer.projections)):
        return "its weights are quantised, or not there"
    return why_no_kernel(layer, dtype)


def _keeps_rows_apart(projection: Projection) -> bool:
    """A projection has weights of a kind whose products can keep the rule."""
    if isinstance(projection, PackedLinear):
        return projection.panels is not None
    return isinstance(projection, DenseLinear) and projection.weight.device.type != "meta"


def why_no_kernel(layer: FusedLayer, dtype: torch.dtype) -> str | None:
    """Says which part of a layer has no kernel, as a sentence's end; None: each part has one. Weights do not count."""
    if isinstance(layer.mlp, MixtureMlp) and layer.mlp.mixture is None:
        return f"there is no kernel for the mixture of experts {layer.mlp.name}"
    for activation in _activations_of_mixture(layer.mlp):
        if activation_of(activation) is None:
            return f"there is no kernel for the activation {type(activation).__name__}"
    norms = (layer.attention_norm, layer.output_norm, layer.mlp_norm, layer.mlp_output_norm)
    for norm in filter(None, (*norms, layer.query_norm, layer.key_norm)):
        own = norm_of(norm)
        # A weight in float32 would make the family's result float32, if it multiplied a number that was rounded.
        if own is None or not (
            own.weight.dtype == dtype or (own.weight.dtype == torch.float32 and own.kind != "rounded")
        ):
            return f"there is no kernel for the norm {type(norm).__name__}"
    for head_norm in filter(None, (layer.query_norm, layer.key_norm)):
        own = cast(Norm, norm_of(head_norm))
        if own.bias is not None or (own.weight.dim() == 2) != (own.kind == "centred"):
            return f"there is no kernel for the norm {type(head_norm).__name__} of heads"
    return None


def _activations_of_mixture(mlp: GatedMlp | MixtureMlp) -> list[nn.Module]:
    if isinstance(mlp, GatedMlp):
        return []
    mixture = cast(Mixture, mlp.mixture)
    found = [mixture.activation] if mixture.shared is None else [mixture.activation, mixture.shared.act_fn]
    return [each for each in found if not isinstance(each, NeighbourGate)]


def _plan_of(layer: FusedLayer) -> _Plan:
    from corolla.kernels.triton.launches import HeadNorms

    query, key = norm_of(layer.query_norm), norm_of(layer.key_norm)
    norms = None
    if query is not None and key is not None:
        norms = HeadNorms(query.weight, key.weight, query.epsilon, key.epsilon, query.kind)
    mlp = layer.mlp
    return _Plan(
        layer,
        attention_norm=norm_of(layer.attention_norm),
        output_norm=norm_of(layer.output_norm),
        mlp_norm=norm_of(layer.mlp_norm),
        mlp_output_norm=norm_of(layer.mlp_output_norm),
        head_norms=norms,
        mlp=_GatedPlan(mlp) if isinstance(mlp, GatedMlp) else MixturePlan(cast(Mixture, mlp.mixture)),
    )


class TritonBlocks(RecordableBlocks):
    """The blocks of a span, run by Triton kernels.

    Args:
        span: the blocks; `why_unsupported` returns None for all of them.
        stacks: the stacked copies of adapters.
        low_rank: the adapters, multiplied by Triton kernels; None: torch multiplies by them.
    """

    name: Final = "triton"

    def __init__(
        self, span: FusedSpan, stacks: AdapterStacks | None = None, low_rank: LowRankTable | None = None
    ) -> None:
        super().__init__(stacks or AdapterStacks(), span.layers[0].device)
        self.span = span
        self.low_rank = low_rank
        self.adapter_product = "torch" if low_rank is None else "triton"
        self._plans = [_plan_of(layer) for layer in span.layers]
        self._ladder = _common_ladder(span)

    @property
    def num_layers(self) -> int:
        """See `RecordableBlocks.num_layers`."""
        return len(self.span.layers)

    @property
    def first_of_kinds(self) -> Sequence[int]:
        """See `RecordableBlocks.first_of_kinds`."""
        return self.span.first_of_kinds

    @property
    def page_part_bytes(self) -> int:
        """See `RecordableBlocks.page_part_bytes`."""
        return max(4 * layer.num_heads * layer.head_dim for layer in self.span.layers)

    @property
    def kept_tables(self) -> tuple[Tensor, ...]:
        """See `RecordableBlocks.kept_tables`; `[positions, 2, rotary size]` in their dtype, on the model's device."""
        return self.span.rotary_tables

    def adapters(self, rows: Sequence[RowWork]) -> AdapterBatch | LowRankBatch | None:
        """See `Blocks.adapters`."""
        found = None
        if self.low_rank is not None and any(row.adapter is not None for row in rows):
            found = LowRankBatch.for_rows(self.low_rank, [(row.adapter, row.num_tokens) for row in rows])
        return super().adapters(rows) if found is None else found

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. `hidden` is `[N, H]` in the model's dtype, on its device."""
        from corolla.kernels.triton.launches import rotate_and_store

        batch, adapters, position_ids = step.batch, step.adapters, step.position_ids
        num_tokens, hidden = len(hidden), hidden.contiguous()
        if adapters is None and (padding := self._padding(num_tokens)):
            # The numbers of the added rows do not matter, since rows do not mix.
            hidden = functional.pad(hidden, (0, 0, 0, padding))
        codec = None if batch.store.codec is None else batch.store.codec.name
        tables = {rotary: _table(rotary, position_ids, step.end, hidden) for rotary in self.span.rotaries}
        delta: Tensor | None = None
        multiplier = 1.0
        for index in layers:
            plan = self._plans[index]
            layer = plan.layer
            normed, hidden = _added(hidden, delta, plan.attention_norm, multiplier)
            multiplier = layer.residual_multiplier
            projected = layer.query_key_value.forward(normed)
            if adapters is not None:
                adapters.add(index, layer.places[0], normed, projected)
            like = projected.new_empty(0, layer.num_key_heads, layer.head_dim)
            keys, values = batch.store.layer_like(index, like, like)
            table, numbers, factors = (None, position_ids, None) if layer.rotary is None else tables[layer.rotary]
            query = rotate_and_store(
                projected, table, numbers, batch.slots(index, hidden.device), keys, values,
                in_pairs=layer.rotary is not None and layer.rotary.in_pairs, norms=plan.head_norms,
                norms_rotated=layer.norms_rotated, codec=codec,
            )  # fmt: skip
            if factors is not None:
                query[:num_tokens] *= factors
            given = LayerInput(index, query, keys, values, layer.scaling, layer.window, layer.softcap, layer.sinks)
            attended = layer.gated(attend_stored(batch, given).view(len(projected), -1), normed, index, adapters)
            output = layer.output.forward(attended)
            if adapters is not None:
                adapters.add(index, layer.places[1], attended, output)
            if plan.output_norm is not None:
                output = plan.output_norm(output)
            later, hidden = _added(hidden, output, plan.mlp_norm, multiplier)
            delta = plan.mlp.forward(normed if layer.is_parallel else later, index, adapters)
            if plan.mlp_output_norm is not None:
                delta = plan.mlp_output_norm(delta)
        return _added(hidden, delta, None, multiplier)[1][:num_tokens]

    def _padding(self, num_tokens: int) -> int:
        """How many rows a step gets at once, since each of its products would pad it by as many."""
        return rung_of(num_tokens, self._ladder) - num_tokens if num_tokens <= self._ladder[-1] else 0


def _common_ladder(span: FusedSpan) -> tuple[int, ...]:
    """The numbers of rows to which steps are padded; `(0,)`: they are not.

    Triton's products take any number of rows. Where some of a span's products are Triton's, only short steps are
    padded, which read weights for longer than they multiply. Routers would choose experts for the added rows, too.
    """
    products = [each.invariant for layer in span.layers for each in layer.projections if isinstance(each, DenseLinear)]
    ladders = [each.ladder for each in products if each is not None and each.name == "ladder"]
    if not ladders or any(isinstance(layer.mlp, MixtureMlp) for layer in span.layers):
        return (0,)
    num_projections = sum(1 for layer in span.layers for _ in layer.projections)
    most = math.inf if len(ladders) == num_projections else SHORT_STEP
    return tuple(rung for rung in sorted(set.intersection(*map(set, ladders))) if rung <= most)


def _table(rotary: RotaryTable, position_ids: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    table, numbers = rotary.numbered(position_ids, end, like)
    if numbers is None:
        numbers = torch.arange(len(position_ids), device=like.device)
    return table, numbers, rotary.query_factors(position_ids, like)


def _added(hidden: Tensor, delta: Tensor | None, norm: Norm | None, multiplier: float) -> tuple[Tensor, Tensor]:
    """The sum of `hidden` and `delta` times `multiplier`: normalised, and as it is."""
    from corolla.kernels.triton.launches import add_norm

    if norm is not None:
        return add_norm(hidden, delta, norm.weight, norm.epsilon, multiplier=multiplier, kind=norm.kind, bias=norm.bias)
    if delta is not None:
        hidden = hidden + (delta if multiplier == 1.0 else delta * multiplier)
    return hidden, hidden


def _shapes(span: FusedSpan) -> tuple[tuple[int, int], ...]:
    """The inputs and outputs of linear layers, neighbours as one; empty if a mixture takes adapters by hooks."""
    found: dict[tuple[int, int], None] = {}
    for layer in span.layers:
        mlp, width = layer.mlp, layer.hidden_size
        if not isinstance(mlp, GatedMlp):
            return ()
        heads, keys = layer.num_heads * layer.head_dim, layer.num_key_heads * layer.head_dim
        found |= dict.fromkeys(
            (
                (width, heads + 2 * keys), (heads, width), (width, (1 + mlp.gates) * mlp.num_gated),
                (mlp.num_gated, width), *(() if layer.gate is None else ((width, heads),)),
            )
        )  # fmt: skip
    return tuple(found)


def choose_triton_blocks(
    span: FusedSpan,
    store: KVStore,
    backend: AttentionBackend,
    dtype: torch.dtype,
    stacks: AdapterStacks,
    *,
    takes_adapters: bool,
) -> TritonBlocks | None:
    """Runs the blocks by Triton kernels if attention does and a trial of each kind of layers holds; else None.

    Args:
        span: the fused blocks.
        store: the store of keys and values.
        backend: the chosen attention.
        dtype: the dtype of hidden states.
        stacks: the stacked copies of adapters.
        takes_adapters: whether rows may have adapters.
    """
    if backend.name != PagedTriton.name:
        return None
    failure = next((failed for layer in span.layers if (failed := why_unsupported(layer, dtype)) is not None), None)
    failure = failure or failure_of(lambda: _failed_trial(span, store.pool.page_tokens, dtype, store.codec))
    if failure is not None:
        log.warning("blocks do not run by Triton kernels", extra={"failure": failure})
        return None
    log.info("blocks run by Triton kernels")
    shapes, low_rank = _shapes(span) if takes_adapters else (), None
    if shapes:
        low_rank = choose_low_rank_table(len(span.layers), shapes, dtype, span.layers[0].device)
    return TritonBlocks(span, stacks, low_rank)


@torch.inference_mode()
def _failed_trial(span: FusedSpan, page_tokens: int, dtype: torch.dtype, codec: KVCodec | None) -> str | None:
    """Tries one layer of each kind. Returns what failed, as a sentence's end, or None."""
    tolerance = TOLERANCES[dtype] if codec is None else max(TOLERANCES[dtype], CODED_TOLERANCE)
    for layer in (span.layers[index] for index in span.first_of_kinds):
        if codec is not None and not _stores_codes_of(codec, layer, dtype):
            return f"they store other codes than the codec {codec.name}"
        if isinstance(layer.mlp, MixtureMlp):
            from corolla.kernels.triton.launches import row_counts

            mixture = cast(Mixture, layer.mlp.mixture)
            if (failure := failed_mixture_trial(mixture, dtype, row_counts())) is not None:
                return failure
        trial = LayerTrial.of_fused(
            layer, lambda part, _store: TritonBlocks(part), PagedTriton(), page_tokens, dtype, codec
        )
        found = try_kernel(trial.run, trial.cuts, trial.error, tolerance)
        if found.failure is not None:
            return found.failure
    return None


def _stores_codes_of(codec: KVCodec, layer: FusedLayer, dtype: torch.dtype) -> bool:
    """Returns True if the kernel that stores keys and values makes the same codes as the codec.

    The heads of some tokens are far larger or smaller than others, so that codes of all kinds occur.
    """
    sizes = 2.0 ** torch.arange(-_CODED_TOKENS, _CODED_TOKENS)
    num_outputs = (layer.num_heads + 2 * layer.num_key_heads) * layer.head_dim
    numbers = torch.randn(len(sizes), num_outputs, generator=torch.Generator().manual_seed(0))
    stored, coded = stored_twice(codec, layer, (sizes[:, None] * numbers).to(layer.device, dtype))
    return all(torch.equal(codec.encode(each), codes) for each, codes in zip(stored, coded, strict=True))


def stored_twice(codec: KVCodec, layer: FusedLayer, qkv: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Has the kernel store keys and values as they are, and as codes, without norm and rotation.

    Args:
        codec: the codec.
        layer: says how many heads there are, and their size.
        qkv: `[N, (heads + 2 * key heads) * head_dim]` in the model's dtype.

    Returns:
        Keys and values `[N, key heads, head_dim]` in the model's dtype, and int8 `[N, key heads, stored size]`; all of
        them on the device of `qkv`.
    """
    from corolla.kernels.triton.launches import rotate_and_store

    slots = torch.arange(len(qkv), device=qkv.device)
    shape = (len(qkv), layer.num_key_heads)
    stored = [qkv.new_empty(*shape, layer.head_dim) for _ in range(2)]
    size = codec.stored_size(layer.head_dim)
    coded = [torch.empty(*shape, size, dtype=torch.int8, device=qkv.device) for _ in range(2)]
    for name, (keys, values) in ((None, stored), (codec.name, coded)):
        rotate_and_store(qkv, None, slots, slots, keys, values, codec=name)
    return stored, coded
