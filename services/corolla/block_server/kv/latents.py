"""Multi-latent attention over rows of different sessions.

Families with it cache a short latent of each token and the part of its key that is rotated, in one head each, and make
keys and values of all heads from them at every step. The sessions' latents are read one behind the other, so that the
family's own code expands them in one product; then each row attends to its own session's part.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from corolla.block_server.kv.attention import AttentionBatch

LATENT = "corolla_latent"

MAX_EXPANDED_BYTES: Final = 1 << 30
"""That the latents of rows which are computed together may take in one layer, once they are expanded."""


def expanded_token_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values of all heads in one layer, and of the product that they are made from."""
    product = config.qk_nope_head_dim + config.v_head_dim
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    return int(config.num_attention_heads * (product + key) * itemsize)


def max_tokens_at_once(config: PretrainedConfig, itemsize: int) -> int:
    """Of so many tokens the latents may be expanded together."""
    return max(1, MAX_EXPANDED_BYTES // expanded_token_bytes(config, itemsize))


def runs_within(num_tokens: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Cuts rows into runs of at most `max_tokens` together, and of one row at least. Pure.

    Args:
        num_tokens: that each row sees, its new ones among them.
    """
    start = total = 0
    for index, count in enumerate(num_tokens):
        if index > start and total + count > max_tokens:
            yield slice(start, index)
            start, total = index, 0
        total += count
    yield slice(start, len(num_tokens))


class PackedLatents(Cache):
    """What the family's code takes for its cache: the latents of all rows of a batch, one row behind the other."""

    def __init__(self, batch: AttentionBatch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores `[1, 1, N, size]` of the new tokens; gives `[1, 1, sum of all rows' tokens, size]`."""
        self._batch.write(layer_idx, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        parts = [row.cache.gather(layer_idx, row.position + row.num_tokens) for row in self._batch.rows]
        latents, rotated = (torch.cat(tensors, dim=1).unsqueeze(0) for tensors in zip(*parts, strict=True))
        return latents, rotated


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
    """transformers' attention function for rows whose keys and values were expanded from `PackedLatents`.

    Args:
        module: the family's attention module.
        query: `[1, heads, N, head_dim]`.
        key: `[1, heads, sum of all rows' tokens, head_dim]`; value likewise, with a head size of its own.
        attention_mask: unused; transformers makes none for functions that it does not know.
        batch: the rows.
        scaling: of the scores; None is one over the root of the head size.

    Returns:
        `[1, N, heads, value head size]` and None.
    """
    outputs: list[Tensor] = []
    first_key = 0
    for row in batch.rows:
        num_keys = row.position + row.num_tokens
        own_query = query[:, :, row.start : row.end]
        own_key, own_value = (tensor.narrow(2, first_key, num_keys) for tensor in (key, value))
        # Without a mask, several queries are taken to start together with the keys.
        starts_later = row.position > 0 and row.num_tokens > 1
        mask = batch.bias(row.position, row.num_tokens, 0, num_keys, None, query) if starts_later else None
        outputs.append(sdpa_attention_forward(module, own_query, own_key, own_value, mask, scaling=scaling)[0])
        first_key += num_keys
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


AttentionInterface.register(LATENT, latent_attention)
