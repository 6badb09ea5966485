"""What one iteration computes: the rows of some steps, as one batch, or one by one where the batch fails."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from corolla.block_server.hop_session import HopSession
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.peers import Peer
from corolla.block_server.runner import BatchOutput, RowWork
from corolla.chassis.errors import CorollaError, NonFiniteOutput, OutOfMemory, StepFailed
from corolla.chassis.handlers import where
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.span import Span
from corolla.wire.tensors import from_payload

log = logging.getLogger(__name__)

# torch raises OutOfMemoryError only for devices; on the CPU, and in libraries below torch, only the text tells.
_OUT_OF_MEMORY: Final = ("can't allocate memory", "not enough memory", "_ALLOC_FAILED")


class BatchRunner(Protocol):
    """What computes: a `Runner`, or what stands before one to let it fail."""

    def forward_each(self, rows: Sequence[RowWork], hidden: Tensor, blocks: Span) -> BatchOutput:
        """As of `Runner`."""

    def warm_up(self) -> None:
        """As of `Runner`."""


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


@dataclass(frozen=True, slots=True)
class Computed:
    """What became of an iteration.

    Attributes:
        outputs: for each row, in order: `[num_tokens, H]`, or why there is none.
        has_raised: the batch raised, and its rows, where it had several, were computed one by one.
    """

    outputs: tuple[Tensor | CorollaError, ...]
    has_raised: bool = False


def compute(runner: BatchRunner, admitted: Sequence[Admitted], blocks: Span) -> Computed:
    """Computes all rows as one batch; if that raises, row by row, so that a bad row fails alone.

    To compute a row again is exact: what the failed batch wrote for its new tokens lies at positions that no session
    counts as held, and the same positions are written again.
    """
    try:
        return Computed(tuple(_outputs(runner, admitted, blocks)))
    except Exception as failure:
        error, place = error_of(failure), where(failure)
    # The exception is gone here, and with it the tensors of its frames, which an exhausted device needs.
    rows = [Admitted(batch.work, [row]) for batch in admitted for row in batch.rows]
    log.error("iteration failed", extra={"rows": len(rows), "where": place})
    if len(rows) == 1:
        return Computed((error,), has_raised=True)
    return Computed(tuple(_alone(runner, row, blocks) for row in rows), has_raised=True)


def _alone(runner: BatchRunner, row: Admitted, blocks: Span) -> Tensor | CorollaError:
    try:
        (output,) = _outputs(runner, [row], blocks)
        return output
    except Exception as failure:
        error, place = error_of(failure), where(failure)
    log.error("row failed", extra={"reason": error.reason, "where": place})
    return error


def _outputs(runner: BatchRunner, admitted: Sequence[Admitted], blocks: Span) -> Iterator[Tensor | CorollaError]:
    work, hidden = packed(admitted)
    output = runner.forward_each(work, hidden, blocks)
    for part, is_finite in zip(
        torch.split(output.hidden, [row.num_tokens for row in work]), output.finite, strict=True
    ):
        yield part if is_finite else NonFiniteOutput("a block's output is not finite")


def error_of(failure: Exception) -> CorollaError:
    """What to tell those whose rows could not be computed. Nothing of the exception's text, which may quote data."""
    if isinstance(failure, CorollaError):
        return failure.with_traceback(None)
    is_memory = isinstance(failure, torch.OutOfMemoryError | MemoryError) or (
        isinstance(failure, RuntimeError) and any(text in str(failure) for text in _OUT_OF_MEMORY)
    )
    if is_memory:
        return OutOfMemory("a block server has too little memory to compute a step")
    return StepFailed("a block server could not compute a step")
