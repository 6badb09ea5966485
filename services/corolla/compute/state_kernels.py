"""Blocks with recurrent states, and with latents, by Triton kernels, on GPUs: all rows of a step share each launch.

The parts are those of `state_parts`. States lie in a table of slots, which a recorded step reads by numbers in its
buffers, as it reads pages. Multi-latent attention takes the latents themselves for keys and values, in prompts, too.

A server takes the kernels only where a trial at start finds their results equal to those of the family's own code up to
rounding, and that the same tokens have the same bits as a chunk, in several chunks, one by one, and next to another
session.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.cache.states import LayerState
from corolla.cache.store import KVStore
from corolla.compute.attention.base import AttentionBackend, AttentionShape
from corolla.compute.attention.latents import shapes_of_latents
from corolla.compute.attention.paged_triton import PagedTriton
from corolla.compute.base import Blocks, PackedStep, RecordableBlocks
from corolla.compute.layer_trial import LayerTrial
from corolla.compute.state_blocks import StateBlocks, consists_of
from corolla.compute.state_parts import (
    RECURRENT,
    Attention,
    Convolution,
    Delta,
    LatentAttention,
    Mlp,
    Part,
    Rows,
    StateSpace,
)
from corolla.compute.triton_blocks import CODED_TOLERANCE, TOLERANCES, MixturePlan, activation_of
from corolla.kernels.kernel_trial import failure_of, try_kernel
from corolla.kernels.state_rows import StateRows
from corolla.models.adapters.products import AdapterStacks
from corolla.models.families import key_shapes, pageless_layers, recurrent_layers
from corolla.models.fused import rotate_heads
from corolla.models.invariant import Norm
from corolla.models.linear import DenseLinear
from corolla.models.mixtures import Mixture, NeighbourGate, failed_mixture_trial
from corolla.models.packed.modules import PackedLinear
from corolla.models.rotary_table import Turn
from corolla.models.span_model import SpanModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelRows(Rows):
    """What all blocks of a call share, and how a GPU computes what needs more than one number of a token.

    Attributes:
        norms: the norms of the blocks, by the family's modules.
        slots: where the states of rows are; None: only attention runs.
    """

    norms: Mapping[nn.Module, Norm]
    slots: StateRows | None

    @property
    def kernels(self) -> Any:
        """The module `state_launches`."""
        from corolla.kernels.triton import state_launches

        return state_launches

    @property
    def have_states(self) -> bool:
        """See `Rows.have_states`."""
        return self.slots is not None

    def norm(self, module: Any, tokens: Tensor) -> Tensor:
        """See `Rows.norm`."""
        return self.norms[module](tokens)

    def product(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """See `Rows.product`."""
        return cast(Tensor, layer(tokens))

    def convolved(self, layer: int, convolution: Convolution, channels: Tensor) -> Tensor:
        """See `Rows.convolved`: float32 `[N, channels]`."""
        (windows,) = self._tensors(layer, convolution, channels, ())
        return self._convolve(convolution, channels, windows, has_activation=False)

    def delta_rule(self, part: Delta, channels: Tensor, gate: Tensor, rates: Tensor, decays: Tensor) -> Tensor:
        """See `Rows.delta_rule`."""
        heads = part.heads
        shape = (heads.num_heads, heads.key_size, heads.value_size)
        windows, states = self._tensors(part.layer, part.convolution, channels, shape)
        mixed = self._convolve(part.convolution, channels, windows, has_activation=True)
        output: Tensor = self.kernels.run_delta_rule(
            mixed, rates, decays, part.offsets, part.factors, states, cast(StateRows, self.slots), heads,
            most_rate=part.most_rate,
        )  # fmt: skip
        norm = part.norm
        gated: Tensor = self.kernels.norm_gated(
            output, gate, norm.weight, norm.variance_epsilon, channels.dtype, activation=norm.activation
        )
        return gated

    def state_space(self, part: StateSpace, channels: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        """See `Rows.state_space`."""
        heads = part.heads
        shape = (heads.num_heads, heads.value_size, heads.key_size)
        windows, states = self._tensors(part.layer, part.convolution, channels, shape)
        mixed = self._convolve(part.convolution, channels, windows, has_activation=True)
        slots = cast(StateRows, self.slots)
        output: Tensor = self.kernels.run_state_space(
            mixed, steps, part.offset, part.factor, part.skip, states, slots, heads
        )
        if isinstance(part.norm, nn.Identity):
            return (output.flatten(1) * functional.silu(gate.float())).to(channels.dtype)
        gated: Tensor = self.kernels.norm_gated(
            output.view(len(output), part.num_groups, -1), gate, part.norm.weight, part.norm.variance_epsilon,
            channels.dtype, gates_first=not part.gates_last,
        )  # fmt: skip
        return gated

    def _convolve(self, convolution: Convolution, channels: Tensor, windows: Tensor, *, has_activation: bool) -> Tensor:
        slots = cast(StateRows, self.slots)
        mixed: Tensor = self.kernels.convolve(
            channels, convolution.weight, convolution.bias, windows, slots, has_activation=has_activation
        )
        return mixed

    def _tensors(
        self, layer: int, convolution: Convolution, channels: Tensor, shape: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """The states of a layer in all slots; `shape` is that of a token's states, and empty without them."""
        store = self.batch.store
        if store.state_table is None:
            raise ValueError("the store has no table of states")
        if layer not in store.state_shapes:
            sizes = channels.shape[1], convolution.weight.shape[-1]
            number = torch.empty((), dtype=torch.float32, device=channels.device)
            store.state_shapes[layer] = LayerState(
                channels.new_empty(()).expand(1, *sizes), number.expand(1, *shape) if shape else None
            )
        return store.state_table.tensors_like(layer, store.state_shapes[layer])


class _KernelMixture(Part):
    """A mixture of experts, whose products and router are kernels."""

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__(module, layer)
        self._plan = MixturePlan(cast(Mixture, Mixture.from_module(module)))

    @staticmethod
    def fits(module: Any) -> bool:
        """See `Part.fits`."""
        mixture = Mixture.from_module(module)
        if mixture is None:
            return False
        activations = [mixture.activation, *([] if mixture.shared is None else [mixture.shared.act_fn])]
        return all(isinstance(each, NeighbourGate) or activation_of(each) is not None for each in activations)

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        return self._plan.forward(normed, self.layer, None)


class _KernelLatents(LatentAttention):
    """Multi-latent attention on the latents themselves, for prompts and single tokens, with or without rotation."""

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        config = module.config
        self._sizes = [int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)]
        of_heads = module.kv_b_proj.weight.detach().view(config.num_attention_heads, -1, config.kv_lora_rank)
        of_keys, self._of_values = torch.split(of_heads, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self._of_keys = of_keys.transpose(1, 2)
        self._has_pairs = bool(getattr(config, "rope_interleave", False))

    def forward(self, normed: Tensor, rows: Rows) -> Tensor:
        """See `Part.forward`."""
        multiply_heads = cast(KernelRows, rows).kernels.multiply_heads
        own, (num_tokens, num_heads) = self._module, (len(normed), len(self._of_values))
        latents, keys = self.latents(normed, rows)
        query, turn = self.queries(normed, rows).view(num_tokens, num_heads, -1), rows.turns.get("")
        plain, rotated = torch.split(query, self._sizes, dim=-1)
        keys = keys.unsqueeze(1)
        if turn is not None:
            rotated, keys = (self._turned(each, turn) for each in (rotated, keys))
        rows.batch.write(self.layer, latents.unsqueeze(1), keys)
        size = own.config.kv_lora_rank
        queries = normed.new_empty(num_tokens, num_heads, size + rotated.shape[-1])
        multiply_heads(plain, self._of_keys, queries)
        queries[..., size:] = rotated
        if turn is not None and turn.query_factors is not None:
            queries *= turn.query_factors
        summed = rows.batch.backend.attend_to_latents(rows.batch, self.layer, queries, own.scaling)
        if summed is None:
            raise ValueError(f"{rows.batch.backend.name} has no attention to latents")
        output = normed.new_empty(num_tokens, num_heads, self._of_values.shape[1])
        multiply_heads(summed, self._of_values, output)
        return rows.product(own.o_proj, output.flatten(1))

    def _turned(self, heads: Tensor, turn: Turn) -> Tensor:
        """Rotates heads, `[N, heads, rotated size]`; those in pairs come out by halves, as the family stores them."""
        if self._has_pairs:
            heads = heads.view(*heads.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return rotate_heads(heads, turn.cos, turn.sin, in_pairs=False)


KINDS: Final[tuple[type[Part], ...]] = (*RECURRENT, Attention, _KernelLatents, _KernelMixture, Mlp)
"""The kinds of parts on a GPU."""


class StateKernels(StateBlocks, RecordableBlocks):
    """Runs all rows together, by kernels. If they have adapters, the family's own code runs them.

    Args:
        model: the span; `why_no_kernels` returns None for it.
        stacks: the stacked copies of adapters.
        adapted: the family's own code.
    """

    name = "triton"

    def __init__(self, model: SpanModel, stacks: AdapterStacks, adapted: Blocks) -> None:
        super().__init__(model, stacks, KINDS, adapted)
        self._norms = {module: norm for module in _modules(model) if (norm := Norm.from_module(module)) is not None}

    @property
    def num_layers(self) -> int:
        """See `RecordableBlocks.num_layers`."""
        return len(self._model.span)

    @property
    def first_of_kinds(self) -> Sequence[int]:
        """See `RecordableBlocks.first_of_kinds`."""
        # A multi-token prediction block may follow the span.
        return [index for index in self._model.first_of_kinds if index < self.num_layers]

    @property
    def page_part_bytes(self) -> int:
        """See `RecordableBlocks.page_part_bytes`."""
        shapes = (shape for layer in self._model.layers for shape in _shapes(layer, None))
        return max((4 * shape.num_heads * shape.value_size for shape in shapes), default=0)

    @property
    def kept_tables(self) -> tuple[Tensor, ...]:
        """See `RecordableBlocks.kept_tables`; `[positions, 2, rotary size]` in their dtype, on the model's device."""
        return tuple(table.table for table in self._tables.values())

    def _rows(self, step: PackedStep, turns: Mapping[str, Turn]) -> Rows:
        return KernelRows(step.rows, (), step.batch, turns, self._norms, step.states)


def _modules(model: SpanModel) -> Iterator[nn.Module]:
    for layer in model.layers:
        yield from layer.modules()


def shapes_of_attention(model: SpanModel) -> Collection[AttentionShape]:
    """What the attention of blocks that `choose_state_kernels` may take asks for; empty: it may not take them."""
    if model.device.type == "cpu" or not are_known(model):
        return ()
    return {
        shape for layer, window in zip(model.layers, model.windows, strict=True) for shape in _shapes(layer, window)
    }


def _shapes(layer: nn.Module, window: int | None) -> Iterator[AttentionShape]:
    for module in layer.modules():
        own: Any = module
        if Attention.fits(module):
            heads = own.config.num_attention_heads, own.config.num_key_value_heads
            yield AttentionShape(*heads, own.head_dim, own.head_dim, own.scaling, window)
    yield from shapes_of_latents(layer.modules())


def are_known(model: SpanModel) -> bool:
    """The blocks of a span have states or latents, and consist of parts that have kernels."""
    past = model.family.past
    return (past.packs_states or past.caches_latents) and not past.picks_tokens and consists_of(model, KINDS)


def why_no_kernels(model: SpanModel) -> str | None:
    """Says what in a span of known parts the kernels cannot run, as a sentence's end; None: they run all of it."""
    for module in _modules(model):
        if isinstance(module, DenseLinear) and module.invariant is None:
            return "rows of its products depend on the batch"
        if isinstance(module, PackedLinear) and module.expanded is not None:
            return "its packed weights are expanded"
        name = type(module).__name__
        if "Norm" in name and not name.endswith("Gated") and Norm.from_module(module) is None:
            return f"there is no kernel for the norm {name}"
    return None


def choose_state_kernels(
    model: SpanModel, store: KVStore, backend: AttentionBackend, stacks: AdapterStacks, own: Blocks
) -> StateKernels | None:
    """Runs the blocks by Triton kernels if attention does and a trial of each kind of layers holds; else None.

    Args:
        model: the span.
        store: the store of keys and values; gets a table of states if blocks have some.
        backend: the chosen attention.
        stacks: the stacked copies of adapters.
        own: runs the blocks without these kernels.
    """
    if backend.name != PagedTriton.name or not are_known(model):
        return None
    blocks = StateKernels(model, stacks, own)
    failure = why_no_kernels(model) or failure_of(lambda: _failed_trial(model, blocks, own, store))
    if failure is not None:
        log.warning("blocks do not run by Triton kernels", extra={"failure": failure})
        return None
    log.info("blocks run by Triton kernels")
    if store.recurrent:
        store.use_state_table()
    return blocks


@torch.inference_mode()
def _failed_trial(model: SpanModel, blocks: StateKernels, own: Blocks, store: KVStore) -> str | None:
    """Tries one layer of each kind. Returns what failed, as a sentence's end, or None."""
    from corolla.kernels.triton.launches import row_counts

    tolerance = TOLERANCES[model.dtype] if store.codec is None else max(TOLERANCES[model.dtype], CODED_TOLERANCE)
    for index in blocks.first_of_kinds:
        mixtures = (Mixture.from_module(module) for module in model.layers[index].modules())
        for mixture in filter(None, mixtures):
            if (failure := failed_mixture_trial(mixture, model.dtype, row_counts())) is not None:
                return failure
        trial = _trial_of(model, index, blocks, own, store)
        found = try_kernel(trial.run, trial.cuts, trial.error, tolerance)
        if found.failure is not None:
            return found.failure
    return None


def _trial_of(model: SpanModel, layer: int, blocks: StateKernels, own: Blocks, store: KVStore) -> LayerTrial:
    """The trial of a layer, whose store is like the one of the server."""
    config, page_tokens, codec = model.config, store.pool.page_tokens, store.codec

    def new_store(num_pages: int) -> KVStore:
        return KVStore(
            1 + num_pages * len(model.span), page_tokens, model.windows, recurrent=recurrent_layers(config),
            pageless=pageless_layers(config), key_shapes=key_shapes(config), codec=codec,
        )  # fmt: skip

    def with_states(made: KVStore) -> Blocks:
        if made.recurrent:
            made.use_state_table()
        return blocks

    like = torch.empty(0, model.hidden_size, dtype=model.dtype, device=model.device)
    return LayerTrial(layer, own, with_states, new_store, PagedTriton(), page_tokens, like, takes_median=True)
