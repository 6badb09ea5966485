"""Attention of queries to one run of keys, and the merge of the results of several runs.

A session's keys may lie in several runs of slots. The softmax over each run is computed by itself, together with the
logarithm of its sum; from these the attention over all runs follows exactly (Rabe and Staats 2021, "Self-attention does
not need O(n^2) memory"; Flash-Decoding splits long contexts in the same way). So keys need not be gathered.

All tensors of a call are on one device.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

# This is an operator of `torch.ops.aten` without that module's look-ups, which take a quarter of the time of a token
# with few keys.
_flash: Final[Callable[..., "Part"]] = torch._scaled_dot_product_flash_attention_for_cpu

Part = tuple[Tensor, Tensor]
"""The output `[1, H, Q, head_dim]` and the float32 log-sum-exp `[1, H, Q]` of some queries over some keys."""


Kernel = Callable[..., Part]
"""A function with the arguments and the result of `math`: the attention of all queries to one run of keys."""


def flash_cpu(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
) -> Part:
    """The `Kernel` of torch's flash attention for CPUs, which reads strided keys without a copy; see `math`.

    `math` also computes what torch's kernel does not support: a softcap, and values of another head size.
    """
    if softcap is not None or keys.shape[-1] != values.shape[-1]:
        return math(query, keys, values, scaling=scaling, bias=bias, is_causal=is_causal, softcap=softcap)
    # The kernel assumes, without a check, that the numbers of a head are contiguous; otherwise it reads wrong numbers.
    query = query if query.stride(-1) == 1 else query.contiguous()
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    output, log_sum = _flash(
        query, keys, values, 0.0, is_causal, attn_mask=None if bias is None else bias[None, None], scale=scaling
    )
    if bias is not None:
        sees_nothing = (bias == -torch.inf).all(dim=-1)
        output = output.masked_fill(sees_nothing[:, None], 0.0)
        log_sum = log_sum.masked_fill(sees_nothing, -torch.inf)
    return output, log_sum


def math(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
) -> Part:
    """The `Kernel` that follows the definition, on any device, with float32 scores: the reference.

    Args:
        query: `[1, H, Q, head_dim]`.
        keys: `[1, H, K, head_dim]` in the query's dtype, with any strides.
        values: `[1, H, K, value head size]`, likewise.
        scaling: the factor of the scores.
        bias: `[Q, K]` in the query's dtype, 0 or minus infinity, added to the scores; None: 0. For a query that sees no
            key, the output is 0 and the log-sum-exp minus infinity.
        is_causal: query `i` sees keys `[0, i]`; Q equals K, and there is no bias.
        softcap: the bound of the scores; None: they are not bounded.
    """
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        num_queries = query.shape[2]
        unseen = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    if bias is not None:
        scores = scores + bias
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)).nan_to_num(0.0)
    return torch.matmul(weights.to(values.dtype), values), log_sum


def sink(sinks: Tensor, like: Part) -> Part:
    """The part of a score without a value: it takes a share of the softmax, and adds nothing to the output.

    Args:
        sinks: the scores, of any shape and dtype that broadcast to the log-sum-exp of `like`.
        like: another part of the same queries.
    """
    output, log_sum = like
    return torch.zeros_like(output), sinks.to(log_sum.dtype).expand(log_sum.shape)


def merge(parts: Sequence[Part]) -> Tensor:
    """The attention over the keys of all parts, `[1, H, Q, head_dim]` in their dtype.

    Each query must see a key of some part.
    """
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.stack([log_sum for _, log_sum in parts]).softmax(dim=0).unsqueeze(-1)
    outputs = torch.stack([output for output, _ in parts])
    return (outputs * weights.to(outputs.dtype)).sum(dim=0)


def merge_two(first: Part, second: Part) -> Part:
    """Merges two parts into one whose output is float32, for parts that are computed one after another.

    Each query must see a key of `first`.
    """
    (output, log_sum), (other, other_log_sum) = first, second
    total = torch.logaddexp(log_sum, other_log_sum)
    share = torch.exp(log_sum - total).unsqueeze(-1)
    return output.float() * share + other.float() * torch.exp(other_log_sum - total).unsqueeze(-1), total
