"""Multi-latent attention over rows of different sessions.

Families with it (DeepSeek-V2, 2024) cache for each token a short latent and the rotated part of its key, in one head
each, and make the keys and values of all heads from both at every step. The family's own code expands the latents, in
one product for as many rows as fit into memory; then each row attends to its own session's part. If a row alone does
not fit, it is expanded piece by piece, and the attention outputs of the pieces are merged (see `partial_attention`).

All tensors of a call are on the device of the pages, in the model's dtype.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from corolla.compute.attention.base import AttentionBatch, PackedRow
from corolla.compute.attention.partial_attention import Part, math, merge_two

LATENT = "corolla_latent"

MAX_EXPANDED_BYTES: Final = 1 << 30
"""The most bytes that expanded latents and the scores over them may take in one layer."""

# Bytes of one query's score in one head and of its intermediate results: a few float32 numbers.
_SCORE_BYTES: Final = 16
_FLOAT32_BYTES: Final = 4


def bytes_of_key(config: PretrainedConfig, like: Tensor, num_queries: int) -> int:
    """Bytes that one token's keys and values of all heads take in one layer while `num_queries` attend to them.

    The sum includes the product that keys and values are made from, the scores and, on CPUs, the copies that torch
    makes. If keys and values differ in head size, torch's attention converts both to float32 and scales the keys. Its
    product copies strided values if the processor has instructions for the dtype.

    Args:
        like: a tensor of any shape with the dtype and device of the computation.
    """
    product = config.qk_nope_head_dim + config.v_head_dim
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    copied = (2 * key + config.v_head_dim) * _FLOAT32_BYTES if like.device.type == "cpu" else 0
    return int(config.num_attention_heads * ((product + key) * like.itemsize + copied + num_queries * _SCORE_BYTES))


def runs_within(costs: Sequence[int], most: int) -> Iterator[slice]:
    """Cuts rows into runs whose costs add up to at most `most`; a row that costs more is a run by itself. Pure."""
    start = total = 0
    for index, cost in enumerate(costs):
        if index > start and total + cost > most:
            yield slice(start, index)
            start, total = index, 0
        total += cost
    yield slice(start, len(costs))


def leave_latents(modules: Iterable[nn.Module]) -> None:
    """Makes attention modules pass latents on unexpanded, since `latent_attention` expands them later."""
    for module in modules:
        if hasattr(module, "expand_kv"):
            cast(Any, module).expand_kv = _as_they_are


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


class PackedLatents(Cache):
    """The transformers `Cache` that the family's code gets; it stores the latents of all rows' new tokens."""

    def __init__(self, batch: AttentionBatch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the latents `key_states` and rotated keys `value_states` of the new tokens, `[1, 1, N, size]` each.

        Returns:
            Both, unchanged, `[1, 1, N, size]` each.
        """
        self._batch.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states


def latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: AttentionBatch,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for rows whose latents `PackedLatents` has stored.

    Args:
        module: the family's attention module, which expands latents.
        query: `[1, heads, N, head_dim]` in the model's dtype.
        key: unused, as `value` is; every row's latents are read from its pages.
        attention_mask: unused; transformers makes no mask for functions that it does not know.
        batch: the rows.
        scaling: the factor of the scores; None: one over the square root of the head size.

    Returns:
        The output `[1, N, heads, value head size]` in the query's dtype, and None.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    key_bytes = [bytes_of_key(cast(Any, module).config, query, row.num_tokens) for row in batch.rows]
    costs = [each * (row.position + row.num_tokens) for each, row in zip(key_bytes, batch.rows, strict=True)]
    outputs: list[Tensor] = []
    for run in runs_within(costs, MAX_EXPANDED_BYTES):
        rows = batch.rows[run]
        if costs[run.start] > MAX_EXPANDED_BYTES:
            piece_tokens = max(1, MAX_EXPANDED_BYTES // key_bytes[run.start])
            outputs.append(_attend_in_pieces(module, query, rows[0], batch, scaling, piece_tokens))
        else:
            outputs.extend(_attend_together(module, query, rows, batch, scaling))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _attend_together(
    module: nn.Module, query: Tensor, rows: Sequence[PackedRow], batch: AttentionBatch, scaling: float
) -> Iterator[Tensor]:
    """Yields each row's output `[1, num_tokens, heads, value head size]`; one product expands all rows' latents."""
    num_keys = [row.position + row.num_tokens for row in rows]
    keys, values = _expanded(module, [_latents(module, row, 0, end) for row, end in zip(rows, num_keys, strict=True)])
    parts = zip(rows, torch.split(keys, num_keys, dim=2), torch.split(values, num_keys, dim=2), strict=True)
    for row, own_keys, own_values in parts:
        own_query = query[:, :, row.start : row.end]
        # If it gets no mask, the function assumes that the first of several queries is at the first key's position.
        starts_later = row.position > 0 and row.num_tokens > 1
        mask = batch.bias(row.position, row.num_tokens, 0, own_keys.shape[2], None, query) if starts_later else None
        yield sdpa_attention_forward(module, own_query, own_keys, own_values, mask, scaling=scaling)[0]


def _attend_in_pieces(
    module: nn.Module, query: Tensor, row: PackedRow, batch: AttentionBatch, scaling: float, piece_tokens: int
) -> Tensor:
    """The output `[1, num_tokens, heads, value head size]` of one row; `piece_tokens` latents are expanded at a time.

    A piece is a run of tokens, not of heads: the layouts of packed or quantised linear layers cannot be cut by outputs.
    """
    own_query = query[:, :, row.start : row.end]
    end = row.position + row.num_tokens

    def attended(start: int) -> Part:
        # This is a function so that a piece's keys and values are freed before the next piece is expanded.
        num_keys = min(piece_tokens, end - start)
        keys, values = _expanded(module, [_latents(module, row, start, start + num_keys)])
        bias = batch.bias(row.position, row.num_tokens, start, num_keys, None, query)
        return math(own_query, keys, values, scaling=scaling, bias=bias)

    whole = attended(0)
    for start in range(piece_tokens, end, piece_tokens):
        whole = merge_two(whole, attended(start))
    return whole[0].to(query.dtype).transpose(1, 2)


def _latents(module: nn.Module, row: PackedRow, start: int, end: int) -> tuple[Tensor, Tensor]:
    """The latents and rotated keys of a row's positions `[start, end)`, `[1, end - start, size]` each."""
    return row.cache.gather(cast(Any, module).layer_idx, end, start)


def _expanded(module: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Expands latents by the family's own code into keys and values `[1, heads, all parts' tokens, head size]`."""
    latents, rotated = (torch.cat(tensors, dim=1).unsqueeze(0) for tensors in zip(*parts, strict=True))
    expand: Any = type(module)
    keys, values = expand.expand_kv(module, latents, rotated)
    return keys, values


AttentionInterface.register(LATENT, latent_attention)
