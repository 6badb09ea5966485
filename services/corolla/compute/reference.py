"""The family's own code, cut out of transformers: any family, on any device. Other ways are compared with it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from corolla.cache.states import LayerState
from corolla.compute.attention.base import CALLED, AttentionBatch, PackedRow
from corolla.compute.attention.latents import EXPANDED, LATENT, PICKED, PackedLatents, leave_latents
from corolla.compute.base import Blocks, PackedStep, RowWork
from corolla.models.adapters.products import AdapterStacks
from corolla.models.families import index_head_size
from corolla.models.span_model import SpanModel
from corolla.wire.span import Span

RAGGED: Final = "corolla_ragged"
"""The attention function of families that keep keys and values of all heads."""


class FamilyBlocks(Blocks):
    """The family's own code: one call runs all rows, since its attention goes through transformers' interface.

    Args:
        model: the span; its attention function is set.
        stacks: the stacked copies of adapters.
        is_exact: whether results have transformers' bits; otherwise short steps attend to latents themselves.
    """

    name = "family"

    def __init__(self, model: SpanModel, stacks: AdapterStacks, *, is_exact: bool) -> None:
        super().__init__(stacks, model.device)
        self._model = model
        self._caches_latents = model.family.past.caches_latents
        if not self._caches_latents:
            model.set_attention(RAGGED)
            return
        leave_latents(model.modules())
        model.set_attention(EXPANDED if is_exact else LATENT)
        if not is_exact:
            self.name = "latents"

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. `hidden` is `[N, H]` in the model's dtype, on its device."""
        cache = PackedLatents(step.batch) if self._caches_latents else None
        # Some families' blocks hand nothing on to their attention, so an argument would not reach it.
        token = CALLED.set(step.batch)
        try:
            return self._model.forward(
                hidden.unsqueeze(0), step.position_ids.unsqueeze(0), blocks=_blocks(self._model, layers),
                past_key_values=cache,
            )[0]  # fmt: skip
        finally:
            CALLED.reset(token)


class FamilyRows(Blocks):
    """The family's own code: each row has a call of its own, with its own adapter, whatever the step has.

    Args:
        model: the span.
        stacks: the stacked copies of adapters.
        is_exact: whether results have transformers' bits; otherwise short steps attend to latents themselves where an
            index picks tokens.
    """

    name = "family"

    def __init__(self, model: SpanModel, stacks: AdapterStacks, *, is_exact: bool = True) -> None:
        super().__init__(stacks, model.device)
        self._model = model
        self._cache_of: Callable[..., _RowCache] = _RowCache
        past = model.family.past
        if past.picks_tokens:
            self._cache_of = functools.partial(_IndexedRowCache, head_size=index_head_size(model.config))
        if past.picks_tokens and past.caches_latents and not is_exact:
            leave_latents(model.modules())
            model.set_attention(PICKED)
            self.name = "latents"

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. `hidden` is `[N, H]` in the model's dtype, on its device."""
        model, outputs = self._model, list[Tensor]()
        for row, part in zip(step.rows, torch.split(hidden, [row.num_tokens for row in step.rows]), strict=True):
            cache: _RowCache | None = None
            is_single = bool(row.position) and model.family.past.continues_singly
            start = row.position
            for tokens in torch.split(part, 1 if is_single else row.num_tokens):
                end = start + len(tokens)
                packed = PackedRow(row.cache, start, 0, len(tokens))
                cache = self._cache_of(
                    AttentionBatch(step.batch.store, [packed], step.batch.backend), model.windows, layers, cache
                )
                positions = torch.arange(start, end, device=hidden.device).unsqueeze(0)
                part_of_row = [row._replace(position=start, num_tokens=len(tokens))]
                model.adapters = self.adapters(part_of_row)
                tell_factors(model, part_of_row)
                outputs.append(
                    model.forward(tokens.unsqueeze(0), positions, blocks=_blocks(model, layers), past_key_values=cache)[
                        0
                    ]
                )
                start = end
            if cache is not None:
                cache.keep_states()
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _blocks(model: SpanModel, layers: Sequence[int]) -> Span:
    return Span(model.span.start + layers[0], model.span.start + layers[-1] + 1)


def tell_factors(model: SpanModel, rows: Sequence[RowWork]) -> None:
    """Tells the rotary embedding which tokens of the next call belong to long texts, if that matters to it."""
    long_rope = model.long_rope
    if long_rope is None:
        return
    if any(row.position + row.num_tokens > long_rope.short_length for row in rows if not row.long_factors):
        raise ValueError(f"a text with short factors has at most {long_rope.short_length} tokens")
    long_rope.is_long = rows[0].long_factors
    if any(row.long_factors != long_rope.is_long for row in rows):
        flags = [row.long_factors for row in rows for _ in range(row.num_tokens)]
        long_rope.is_long = torch.tensor(flags, device=model.device)


class _RowCache(Cache):
    """One row's cache as a transformers `Cache`, for layers that run transformers' own code.

    A layer with a window gets only the keys and values within it. Recurrent layers get copies of their states, since
    they write to these in place and the session's own states must not change before the step is committed.

    Args:
        batch: the batch of the one row.
        windows: the windows of all layers; None for a layer without one.
        layers: the layers that run.
        before: the cache after the earlier tokens of the same step; None for the step's first tokens.
    """

    def __init__(
        self, batch: AttentionBatch, windows: Sequence[int | None], layers: Sequence[int], before: "_RowCache | None"
    ) -> None:
        super().__init__(layers=[DummyLayer() for _ in windows])
        self._batch = batch
        self._windows = windows
        (self._row,) = batch.rows
        self._position = self._row.position
        if before is None:
            self._begin(layers)
        else:
            self.layers = before.layers

    def _begin(self, layers: Sequence[int]) -> None:
        states = self._row.cache.states
        if states is not None:
            held = states.at(self._position)
            for layer in self._batch.store.recurrent.intersection(layers):
                self.layers[layer] = held[layer].to_layer() if self._position else LinearAttentionLayer()

    def keep_states(self) -> None:
        """Stores the recurrent states after the step in the session's cache, as computed but not yet committed."""
        states, shapes = self._row.cache.states, self._batch.store.state_shapes
        for index, layer in enumerate(self.layers):
            if states is not None and isinstance(layer, LinearAttentionLayer):
                state = states.computed[index] = LayerState.from_layer(layer)
                if index not in shapes:
                    shapes[index] = state.shape()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._batch.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        end = self._position + self._row.num_tokens
        keys, values = self._row.cache.gather(layer_idx, end, self._first_key(layer_idx))
        return keys.unsqueeze(0), values.unsqueeze(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._position

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        first_key = self._first_key(layer_idx)
        return self._position + query_length - first_key, first_key

    @property
    def is_sliding(self) -> list[bool]:
        return [window is not None for window in self._windows]

    @property
    def is_linear(self) -> list[bool]:
        return [layer in self._batch.store.pageless for layer in range(len(self._windows))]

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * len(self._windows)

    def _first_key(self, layer_idx: int) -> int:
        window = self._windows[layer_idx]
        return 0 if window is None else max(0, self._position - window + 1)

    @property
    def is_compileable(self) -> bool:
        return False


class _IndexedRowCache(_RowCache):
    """Like `_RowCache`, for blocks with an index, which picks the tokens that a token attends to.

    Keys of the index are one more head next to those of values, or to the rotated part of latents, and the shorter of
    both is padded.

    Args:
        head_size: the larger of the two.
        others: see `_RowCache`.
    """

    def __init__(self, *others: Any, head_size: int) -> None:
        super().__init__(*others)
        self._head_size = head_size
        self.layers = [_IndexedLayer(self, layer) for layer in range(len(self.layers))]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values, or latents and their rotated parts, `[1, heads, T, size]` each.

        Returns:
            Those of all tokens of the text, `[1, heads, tokens, size]` each.
        """
        store, slots = self._batch.store, self._batch.slots(layer_idx, key_states.device)
        key, value = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        num_heads, size = value.shape[1:]
        padded = self._padded(value)
        keys, values = store.layer_like(layer_idx, key, padded[:, :1].expand(-1, num_heads + 1, -1))
        keys.index_copy_(0, slots, store.encoded(key))
        values[:, :num_heads].index_copy_(0, slots, store.encoded(padded))
        held_keys, held = self._gathered(layer_idx)
        return held_keys.unsqueeze(0), held[None, :num_heads, :, :size]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Stores keys of the index, `[1, T, size]`. Returns those of all tokens of the text, `[1, tokens, size]`."""
        store, slots = self._batch.store, self._batch.slots(layer_idx, indexer_key_states.device)
        padded = self._padded(indexer_key_states.transpose(0, 1))
        store.layer(layer_idx)[1][:, -1:].index_copy_(0, slots, store.encoded(padded))
        return self._gathered(layer_idx)[1][-1:, :, : indexer_key_states.shape[-1]]

    def _gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._row.cache.gather(layer, self._position + self._row.num_tokens)

    def _padded(self, heads: Tensor) -> Tensor:
        """`[T, 1, size]`, with zeros up to the size of a head."""
        return pad(heads, (0, self._head_size - heads.shape[-1]))


class _IndexedLayer(DummyLayer):
    """A layer of an `_IndexedRowCache`, which some families give the keys of the index."""

    def __init__(self, cache: _IndexedRowCache, layer: int) -> None:
        cast(Any, super()).__init__()
        self._cache, self._layer = cache, layer

    def update_index(self, idx_k: Tensor) -> Tensor:
        """See `_IndexedRowCache.update_indexer`; both tensors have one more dimension in front."""
        return self._cache.update_indexer(idx_k[0], self._layer).unsqueeze(0)


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for the rows of the batch `CALLED`.

    The store knows the layer's window.

    Args:
        module: the family's attention module; its `layer_idx` picks the layer of the caches.
        query: `[1, heads, N, head_dim]` in the model's dtype.
        key: `[1, key heads, N, head_dim]` in the same dtype.
        value: `[1, key heads, N, value head size]` in the same dtype.
        attention_mask: unused; transformers makes no mask for functions that it does not know.
        scaling: the factor of the scores; None: one over the square root of the head size.
        softcap: the bound of the scores; None: they are not bounded.
        s_aux: `[heads]` in the model's dtype or float32, the sinks; None: there are none.

    Returns:
        The output `[1, N, heads, value head size]` in the query's dtype, and None.
    """
    layer: Any = module.layer_idx
    batch = CALLED.get()
    output = batch.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=batch.store.window_of(layer),
        softcap=softcap,
        sinks=s_aux,
    )
    # transformers' own functions return a contiguous tensor, and some families make a view of it.
    return output.contiguous().unsqueeze(0), None


AttentionInterface.register(RAGGED, ragged_attention)
