"""Reads out what clients ask about a prompt: log probabilities, and hidden states after the final norm."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from corolla.chassis.errors import MalformedMessage, NonFiniteOutput
from corolla.compute.device_memory import most_logit_rows
from corolla.decoding.parameters import MAX_LOGPROBS
from corolla.models.edges import Edges
from corolla.v1 import blocks_pb2 as pb


def check(readout: pb.Readout, num_tokens: int, vocab_size: int) -> None:
    """Checks the readout of a row of `num_tokens` tokens. Raises MalformedMessage."""
    if readout.first_token + len(readout.scored_token_ids) > num_tokens:
        raise MalformedMessage("readout", "must not score more tokens than follow the tokens of the row")
    if max(readout.scored_token_ids, default=0) >= vocab_size:
        raise MalformedMessage("readout", f"must have ids below {vocab_size}")
    if readout.num_top > MAX_LOGPROBS or readout.pooling not in pb.Readout.Pooling.values():
        raise MalformedMessage("readout", f"must ask for at most {MAX_LOGPROBS} tokens, and for a known pooling")


def read_out(edges: Edges, readout: pb.Readout, hidden: Tensor) -> pb.SampledRow:
    """The scores and the pooled hidden state that a readout asks for, in a row without chosen tokens.

    Args:
        hidden: `[num_tokens, H]`, the last block's output for the row's tokens, in the model's dtype on its device.

    Raises:
        NonFiniteOutput: a log probability or a hidden state is not finite.
    """
    row = pb.SampledRow()
    end = readout.first_token + len(readout.scored_token_ids)
    row.scored.extend(_scored(edges, readout, hidden[readout.first_token : end]))
    if readout.pooling != pb.Readout.POOLING_NONE:
        pooled = _pooled(edges, readout.pooling, hidden)
        if not math.isfinite(float(pooled.sum())):
            raise NonFiniteOutput("The model's output is not finite.")
        row.pooled.extend(pooled.tolist())
    return row


@torch.inference_mode()
def _scored(edges: Edges, readout: pb.Readout, hidden: Tensor) -> Iterator[pb.SampledToken]:
    """The log probabilities of the scored tokens; `hidden` is `[S, H]`, one row for the token before each of them."""
    start, size = 0, most_logit_rows(edges.config.vocab_size)
    while start < len(hidden):
        part = hidden[start : start + size]
        token_ids: Sequence[int] = readout.scored_token_ids[start : start + size]
        start += size
        logprobs = edges.head(part).log_softmax(dim=-1)
        chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)).squeeze(1)
        top = logprobs.topk(min(readout.num_top, logprobs.shape[1]), dim=-1)
        facts = zip(token_ids, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        for token_id, logprob, top_ids, top_logprobs in facts:
            if not math.isfinite(logprob):
                raise NonFiniteOutput("The model's output is not finite.")
            yield pb.SampledToken(token_id=token_id, logprob=logprob, top_token_ids=top_ids, top_logprobs=top_logprobs)


@torch.inference_mode()
def _pooled(edges: Edges, pooling: pb.Readout.Pooling.ValueType, hidden: Tensor) -> Tensor:
    """Float32 `[H]`: the sum of the tokens' normed hidden states, or the last one; `hidden` is `[num_tokens, H]`."""
    if pooling == pb.Readout.POOLING_LAST:
        return edges.norm(hidden[-1:])[0].float()
    return edges.norm(hidden).float().sum(dim=0)
