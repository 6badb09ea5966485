"""What one iteration computes: the rows of some steps, as one batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corolla.block_server.held import HopSession
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.peers import Peer
from corolla.block_server.runner import RowWork
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.tensors import from_payload


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step as it arrived, with the stream that it came on."""

    step: pb.Step
    payload: Buffer
    sender: Peer


@dataclass(slots=True)
class Admitted:
    """The rows of one step that may be computed, with where they lie in the step's payload."""

    work: StepWork
    rows: list[tuple[pb.StepRow, HopSession[SessionCache], int]]


def packed(admitted: Sequence[Admitted]) -> tuple[list[RowWork], Tensor]:
    """All rows of all steps, and what goes in: `[tokens, H]`."""
    work: list[RowWork] = []
    hidden: list[Tensor] = []
    for batch in admitted:
        step = batch.work.step
        num_tokens = sum(row.num_tokens for row in step.rows)
        states = from_payload(batch.work.payload, step.dtype, num_tokens, step.hidden_size)
        for row, session, offset in batch.rows:
            work.append(RowWork(session.cache, row.position, row.num_tokens, session.request.prompts))
            if len(batch.rows) < len(step.rows):
                hidden.append(states[offset : offset + row.num_tokens])
        if len(batch.rows) == len(step.rows):
            hidden.append(states)
    return work, hidden[0] if len(hidden) == 1 else torch.cat(hidden)
