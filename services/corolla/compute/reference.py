"""The family's own code, cut out of transformers: any family, on any device. Other ways are compared with it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from corolla.cache.states import LayerState
from corolla.cache.store import KVStore
from corolla.compute.attention.base import AttentionBackend, AttentionBatch, PackedRow
from corolla.compute.attention.latents import LATENT, PackedLatents, leave_latents
from corolla.compute.attention.ragged import RAGGED
from corolla.compute.base import RowWork
from corolla.models.adapters.products import AdapterBatch, AdapterStacks
from corolla.models.span_model import SpanModel
from corolla.wire.span import Span


class ReferenceBlocks:
    """Runs blocks by the family's own code.

    If the family's attention goes through transformers' interface, one call runs all rows; else each row has its own.

    Args:
        model: the span; its attention function is set.
        store: the store of the rows' keys and values.
        stacks: the stacked copies of adapters.
    """

    def __init__(self, model: SpanModel, store: KVStore, stacks: AdapterStacks) -> None:
        self._model = model
        self._store = store
        self._stacks = stacks
        if model.packs_rows:
            model.set_attention(LATENT if model.family.past.caches_latents else RAGGED)
            if model.family.past.caches_latents:
                leave_latents(model.modules())

    def packed(self, hidden: Tensor, position_ids: Tensor, batch: AttentionBatch, blocks: Span) -> Tensor:
        """Runs `blocks` over packed rows.

        Args:
            hidden: `[N, H]` of all new tokens, in the model's dtype on its device.
            position_ids: int64 `[N]`, on the same device.

        Returns:
            `[N, H]` in the same dtype, on the same device.
        """
        cache = PackedLatents(batch) if self._model.family.past.caches_latents else None
        return self._model.forward(
            hidden.unsqueeze(0), position_ids.unsqueeze(0), blocks=blocks, past_key_values=cache, batch=batch
        )[0]

    def row_by_row(self, rows: Sequence[RowWork], hidden: Tensor, blocks: Span, backend: AttentionBackend) -> Tensor:
        """Runs `blocks` over one row after the other.

        Args:
            hidden: `[N, H]` of all new tokens, in the model's dtype on its device.

        Returns:
            `[N, H]` in the same dtype, on the same device.
        """
        outputs: list[Tensor] = []
        windows, layers = self._model.windows, self._model.span.indices(blocks)
        for row, part in zip(rows, torch.split(hidden, [row.num_tokens for row in rows]), strict=True):
            cache: _RowCache | None = None
            is_single = bool(row.position) and self._model.family.past.continues_singly
            start = row.position
            for tokens in torch.split(part, 1 if is_single else row.num_tokens):
                end = start + len(tokens)
                batch = AttentionBatch(self._store, [PackedRow(row.cache, start, 0, len(tokens))], backend)
                cache = _RowCache(batch, windows, layers, cache)
                positions = torch.arange(start, end, device=hidden.device).unsqueeze(0)
                part_of_row = row._replace(position=start, num_tokens=len(tokens))
                self._model.adapters = self.adapters([part_of_row])
                self.tell_factors([part_of_row], tokens.device)
                outputs.append(
                    self._model.forward(tokens.unsqueeze(0), positions, blocks=blocks, past_key_values=cache)[0]
                )
                start = end
            if cache is not None:
                cache.keep_states()
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def tell_factors(self, rows: Sequence[RowWork], device: torch.device) -> None:
        """Tells the rotary embedding which tokens of the next call belong to long texts, if that matters to it."""
        long_rope = self._model.long_rope
        if long_rope is None:
            return
        if any(row.position + row.num_tokens > long_rope.short_length for row in rows if not row.long_factors):
            raise ValueError(f"a text with short factors has at most {long_rope.short_length} tokens")
        long_rope.is_long = rows[0].long_factors
        if any(row.long_factors != long_rope.is_long for row in rows):
            flags = [row.long_factors for row in rows for _ in range(row.num_tokens)]
            long_rope.is_long = torch.tensor(flags, device=device)

    def adapters(self, rows: Sequence[RowWork]) -> AdapterBatch | None:
        """The rows' adapters, as layers take them; None if no row has one."""
        if all(row.adapter is None for row in rows):
            return None
        return AdapterBatch([(row.adapter, row.num_tokens) for row in rows], self._stacks, self._model.device)


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
        self, batch: AttentionBatch, windows: Sequence[int | None], layers: range, before: "_RowCache | None"
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

    def _begin(self, layers: range) -> None:
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
