"""The attention function that transformers calls where families keep keys and values of all heads.

All tensors of a call are on the device of the pages.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from corolla.compute.attention.base import AttentionBatch

RAGGED = "corolla_ragged"


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: AttentionBatch,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for the rows of a batch.

    The store knows the layer's window.

    Args:
        module: the family's attention module; its `layer_idx` picks the layer of the caches.
        query: `[1, heads, N, head_dim]` in the model's dtype.
        key: `[1, key heads, N, head_dim]` in the same dtype.
        value: `[1, key heads, N, value head size]` in the same dtype.
        attention_mask: unused; transformers makes no mask for functions that it does not know.
        batch: the rows.
        scaling: the factor of the scores; None: one over the square root of the head size.
        softcap: the bound of the scores; None: they are not bounded.
        s_aux: `[heads]` in the model's dtype or float32, the sinks; None: there are none.

    Returns:
        The output `[1, N, heads, value head size]` in the query's dtype, and None.
    """
    layer: Any = module.layer_idx
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
