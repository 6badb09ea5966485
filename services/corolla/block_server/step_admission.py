"""What a step finds when its turn comes: each of its rows is checked against its session."""

from collections.abc import Callable, Sequence
from typing import Protocol

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.hop_session import RingPlace
from corolla.block_server.iteration import Admitted, StepWork
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.peers import Peer
from corolla.block_server.scheduler import QueuedStep
from corolla.block_server.sessions import SessionTable
from corolla.chassis.errors import CorollaError, MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.span import Span


class Fault(Protocol):
    """Tells the clients of a step why rows of it fail."""

    def __call__(
        self, step: pb.Step, error: CorollaError, rows: Sequence[pb.StepRow], sender: Peer | None, /
    ) -> None: ...


class StepAdmission:
    """Admits rows to an iteration. To be asked between two iterations, in the order in which steps are computed.

    Args:
        clock: in seconds; of leases.
    """

    def __init__(
        self,
        sessions: SessionTable[SessionCache],
        outputs: BoundaryActivations,
        fault: Fault,
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._outputs = outputs
        self._fault = fault
        self._clock = clock

    def admit(self, queued: QueuedStep[StepWork]) -> Admitted:
        """The rows of a step that may be computed; the others are answered, but for those that nobody waits for."""
        step = queued.item.step
        admitted = Admitted(queued.item, [])
        if self._is_copy(step):
            return admitted
        # All sources are read before any row changes: rows may swap.
        forks = {
            row.session_id: self._fork(row, step.client_id, queued.blocks) for row in step.rows if row.source_session_id
        }
        forked_outputs = {row.session_id: self._outputs.copy(row.source_session_id) for row in step.rows if forks}
        offset = 0
        for row in step.rows:
            forked = forks.pop(row.session_id, None)
            is_admitted = False
            try:
                is_admitted = self._admit_row(admitted, row, queued.blocks, offset, forked)
            except CorollaError as error:
                self._fault(step, error, [row], queued.item.sender)
            if is_admitted and forked is not None:
                self._outputs.replace(row.session_id, forked_outputs[row.session_id])
            elif isinstance(forked, SessionCache):
                forked.clear()
            offset += row.num_tokens
        return admitted

    def _is_copy(self, step: pb.Step) -> bool:
        """Whether the step came before, and is answered then."""
        if step.HasField("ring"):
            return False
        is_new = [
            self._sessions.note_step(_session_id(step, row), row.epoch, step.client_id, step.step_id)
            for row in step.rows
        ]
        return not all(is_new)

    def _goes_round(self, row: pb.StepRow, client_id: bytes) -> bool:
        """Whether a row of a ring comes for the first time, of a session that its client has not ended."""
        is_new = self._sessions.note_ring_step(row.session_id, row.epoch, client_id, row.position)
        return is_new and not self._sessions.has_ended(row.session_id, row.epoch, client_id)

    def _admit_row(
        self,
        admitted: Admitted,
        row: pb.StepRow,
        blocks: Span,
        offset: int,
        forked: SessionCache | CorollaError | None,
    ) -> bool:
        """Whether the row is to be computed; raises where its client has to learn why it is not."""
        step = admitted.work.step
        client_id = step.client_id or row.client_id
        if step.HasField("ring") and not self._goes_round(row, client_id):
            return False
        if isinstance(forked, CorollaError):
            raise forked
        session = self._sessions.for_step(
            _session_id(step, row),
            row.epoch,
            client_id,
            row.position,
            row.num_tokens,
            blocks,
            self._clock(),
            forked,
        )
        if admitted.samples and row.num_result_tokens and session.request.sampler is None:
            raise MalformedMessage("samples", "the session was opened without a sampler")
        if step.HasField("ring") and not step.ring.microbatch:
            session.ring = RingPlace.of(step)
        admitted.rows.append((row, session, offset))
        return True

    def _fork(self, row: pb.StepRow, client_id: bytes, blocks: Span) -> SessionCache | CorollaError:
        try:
            return self._sessions.fork(row.source_session_id, row.session_id, client_id, blocks)
        except CorollaError as error:
            return error


def _session_id(step: pb.Step, row: pb.StepRow) -> bytes:
    """The session in which a row runs here."""
    return row.scratch_session_id if step.scratch_hops & 1 else row.session_id
