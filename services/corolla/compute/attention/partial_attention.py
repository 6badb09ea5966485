"""Attention of queries to one run of keys, and the merge of the results of several runs.

A row's keys may take too much memory at a time. The softmax over each run is computed by itself, together with the
logarithm of its sum; from these the attention over all runs follows exactly (Rabe and Staats 2021, "Self-attention does
not need O(n^2) memory").

All tensors of a call are on one device.
"""

import torch
from torch import Tensor

Part = tuple[Tensor, Tensor]
"""The output `[1, H, Q, head_dim]` and the float32 log-sum-exp `[1, H, Q]` of some queries over some keys."""


def attend(query: Tensor, keys: Tensor, values: Tensor, *, scaling: float, bias: Tensor | None = None) -> Part:
    """The attention of all queries to one run of keys by the definition, on any device, with float32 scores.

    Args:
        query: `[1, H, Q, head_dim]`.
        keys: `[1, H, K, head_dim]` in the query's dtype, with any strides.
        values: `[1, H, K, value head size]`, likewise.
        scaling: the factor of the scores.
        bias: `[Q, K]` in the query's dtype, 0 or minus infinity, added to the scores; None: 0. For a query that sees no
            key, the output is 0 and the log-sum-exp minus infinity.
    """
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scaling
    if bias is not None:
        scores = scores + bias
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)).nan_to_num(0.0)
    return torch.matmul(weights.to(values.dtype), values), log_sum


def merge(first: Part, second: Part) -> Part:
    """Merges two parts into one whose output is float32. Each query must see a key of `first`."""
    (output, log_sum), (other, other_log_sum) = first, second
    total = torch.logaddexp(log_sum, other_log_sum)
    share = torch.exp(log_sum - total).unsqueeze(-1)
    return output.float() * share + other.float() * torch.exp(other_log_sum - total).unsqueeze(-1), total
