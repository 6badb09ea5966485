"""From the hidden states that come back to the next step's input: head, choice of tokens and embedding, in one go.

All of it happens in one job of the compute thread, for all rows of a microbatch: a hand-over between threads costs as
much as a small model's head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from corolla.chain.pending import RowResult
from corolla.chassis.errors import CorollaError, InternalError
from corolla.models.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.tensors import from_payload


class TokenSampler(Protocol):
    """Who chooses the tokens of one sequence. Called in the compute thread while its owner waits for the step."""

    def sample(self, logits: torch.Tensor) -> list[int]:
        """Chooses at least one token and at most T from float32 `[T, V]` logits after the step's last T tokens.

        All but the last one are tokens that the step processed already.

        Raises CorollaError where this sequence cannot continue; others are not affected.
        """

    @property
    def wants_more(self) -> bool:
        """Whether the newest token will be processed, too."""


@dataclass(frozen=True, slots=True)
class RowOutput:
    """A row whose step came back from the last hop."""

    row: pb.StepRow
    result: RowResult
    sampler: TokenSampler


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step gave: `position` is that of the last token.

    `hidden` `[1, H]` is the input of block 0 for that token; None where the sequence ends with it.
    """

    token_ids: list[int]
    position: int
    hidden: torch.Tensor | None


def embed(edges: Edges, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """`[T, H]` for tokens of any sequences, each at its own position."""
    return edges.embed(torch.tensor(token_ids), torch.tensor(positions))


def sample_rows(edges: Edges, outputs: Sequence[RowOutput]) -> list[SampledTokens | CorollaError]:
    """Reads what arrived, and embeds what comes next; one entry for each output, in order."""
    results = [output.result for output in outputs]
    states = [from_payload(each.payload, each.dtype, each.num_tokens, each.hidden_size) for each in results]
    logits = edges.head(states[0] if len(states) == 1 else torch.cat(states))
    sampled_rows: list[SampledTokens | CorollaError] = []
    for output, rows in zip(outputs, torch.split(logits, [each.num_tokens for each in results]), strict=True):
        row = output.row
        try:
            token_ids = output.sampler.sample(rows)
        except CorollaError as error:
            sampled_rows.append(error)
            continue
        if not 1 <= len(token_ids) <= row.num_result_tokens:
            raise InternalError("a sampler chooses at least one token, and no more than there are logits for")
        position = row.position + row.num_tokens - row.num_result_tokens + len(token_ids)
        sampled_rows.append(SampledTokens(token_ids, position, None))
    return _with_next_inputs(edges, outputs, sampled_rows)


def _with_next_inputs(
    edges: Edges, outputs: Sequence[RowOutput], sampled_rows: list[SampledTokens | CorollaError]
) -> list[SampledTokens | CorollaError]:
    going_on = [
        (index, sampled)
        for index, (output, sampled) in enumerate(zip(outputs, sampled_rows, strict=True))
        if isinstance(sampled, SampledTokens) and output.sampler.wants_more
    ]
    if going_on:
        hidden = embed(
            edges,
            [sampled.token_ids[-1] for _, sampled in going_on],
            [sampled.position for _, sampled in going_on],
        )
        for (index, sampled), states in zip(going_on, hidden.unsqueeze(1).unbind(), strict=True):
            sampled_rows[index] = SampledTokens(sampled.token_ids, sampled.position, states)
    return sampled_rows
