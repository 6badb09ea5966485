"""From the hidden states that come back to the next step's input: head, choice of tokens and embedding, in one go.

All of it happens in one job of the compute thread, for all rows of a gang: a hand-over between threads costs as much as
a small model's head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from corolla.chassis.errors import CorollaError, InternalError
from corolla.client.chain.awaited import RowResult
from corolla.client.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.tensors import from_payload


class Reader(Protocol):
    """Who chooses the tokens of one sequence. Called in the compute thread while its owner waits for the step."""

    def read(self, logits: torch.Tensor) -> list[int]:
        """Chooses the tokens that follow.

        Args:
            logits: float32 `[T, V]`, after the step's last T tokens.

        Returns:
            At least one token and at most T: all but the last one are tokens that the step processed already.

        Raises:
            CorollaError: this sequence cannot go on; others are not concerned.
        """

    @property
    def goes_on(self) -> bool:
        """Whether the newest token will be processed, too."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row whose step came back from the last hop."""

    row: pb.StepRow
    result: RowResult
    reader: Reader


@dataclass(frozen=True, slots=True)
class Reading:
    """What a step gave.

    Attributes:
        token_ids: as chosen.
        position: of the last of them.
        hidden: `[1, H]`, the input of block 0 for the last of them; None where the sequence ends with it.
    """

    token_ids: list[int]
    position: int
    hidden: torch.Tensor | None


def embed(edges: Edges, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """`[T, H]` for tokens of any sequences, each at its own position."""
    return edges.embed(torch.tensor(token_ids), torch.tensor(positions))


def read(edges: Edges, arrivals: Sequence[Arrival]) -> list[Reading | CorollaError]:
    """Reads what arrived, and embeds what comes next; one entry for each arrival, in order."""
    results = [arrival.result for arrival in arrivals]
    states = [from_payload(each.payload, each.dtype, each.num_tokens, each.hidden_size) for each in results]
    logits = edges.head(states[0] if len(states) == 1 else torch.cat(states))
    readings: list[Reading | CorollaError] = []
    for arrival, rows in zip(arrivals, torch.split(logits, [each.num_tokens for each in results]), strict=True):
        row = arrival.row
        try:
            token_ids = arrival.reader.read(rows)
        except CorollaError as error:
            readings.append(error)
            continue
        if not 1 <= len(token_ids) <= row.num_result_tokens:
            raise InternalError("a reader chooses at least one token, and no more than there are logits for")
        position = row.position + row.num_tokens - row.num_result_tokens + len(token_ids)
        readings.append(Reading(token_ids, position, None))
    return _with_next_inputs(edges, arrivals, readings)


def _with_next_inputs(
    edges: Edges, arrivals: Sequence[Arrival], readings: list[Reading | CorollaError]
) -> list[Reading | CorollaError]:
    going_on = [
        (index, reading)
        for index, (arrival, reading) in enumerate(zip(arrivals, readings, strict=True))
        if isinstance(reading, Reading) and arrival.reader.goes_on
    ]
    if going_on:
        hidden = embed(
            edges,
            [reading.token_ids[-1] for _, reading in going_on],
            [reading.position for _, reading in going_on],
        )
        for (index, reading), states in zip(going_on, hidden.unsqueeze(1).unbind(), strict=True):
            readings[index] = Reading(reading.token_ids, reading.position, states)
    return readings
