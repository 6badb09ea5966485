"""Steps that arrived, and the check of each row against its session when the step's turn has come."""

from collections.abc import Callable
from dataclasses import dataclass, field

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.hop_session import HopSession, RingPlace
from corolla.block_server.peers import Peer, StepFaults
from corolla.block_server.row_sampling import SessionSampler
from corolla.block_server.scheduler import QueuedStep
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError, MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.span import Span


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step as it arrived. `sender` is the stream that it came on; None if this server made the step."""

    step: pb.Step
    payload: Buffer
    sender: Peer | None


@dataclass(slots=True)
class AdmittedStep:
    """The rows of one step that may be computed, each with its session and its first token's index in the payload.

    Attributes:
        samples: whether tokens are chosen here from the outputs of the step's rows.
        onward: the message to the next hop if every row has an output, as far as it is made before the outputs.
    """

    work: StepWork
    rows: list[tuple[pb.StepRow, HopSession[SessionCache], int]]
    samples: bool = field(init=False)
    onward: pb.Step | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # It is asked for each row, and reading a message takes longer than reading an attribute.
        self.samples = self.work.step.samples and not self.work.step.route

    def sampler_for(self, row: pb.StepRow, session: HopSession[SessionCache]) -> SessionSampler | None:
        """The sampler that chooses the tokens of one of the step's rows; None: none are chosen for it here."""
        return session.request.sampler if self.samples and row.num_result_tokens else None

    @property
    def comes_round_here(self) -> bool:
        """True if the step belongs to rings that have no other hop than this server."""
        step = self.work.step
        return self.samples and step.HasField("ring") and step.blocks.start == 0

    @property
    def sends_all_outputs(self) -> bool:
        """True if the outputs of all tokens leave this server, to the next hop or to the client."""
        if self.work.step.route:
            return True
        return not self.samples and all(row.num_tokens == row.num_result_tokens for row, _, _ in self.rows)

    @property
    def brings_ids(self) -> bool:
        """True if the rows of the step bring token ids; else they bring hidden states."""
        return self.work.step.dtype == pb.TENSOR_TYPE_UNSPECIFIED


@dataclass(eq=False, repr=False)
class StepAdmission:
    """Admits rows to an iteration. It must be called between two iterations, in the order in which steps are computed.

    Args:
        clock: returns the time in seconds, from which leases are prolonged.
    """

    sessions: SessionTable[SessionCache]
    outputs: BoundaryActivations
    faults: StepFaults
    clock: Callable[[], float]

    def admit(self, queued: QueuedStep[StepWork]) -> AdmittedStep:
        """Returns the rows of a step that may be computed. Other rows get a fault, unless no client waits for them."""
        step = queued.item.step
        admitted = AdmittedStep(queued.item, [])
        is_ring_step = step.HasField("ring")
        if not is_ring_step and self._is_copy(step):
            return admitted
        ring = RingPlace.from_step(step) if is_ring_step and not step.ring.microbatch else None
        samples, now_s = admitted.samples, self.clock()
        # All source sessions are forked before a row changes a session: two rows may swap their sessions' contents.
        rows = list(step.rows)
        forks = {
            row.session_id: self._fork(row, step.client_id, queued.blocks) for row in rows if row.source_session_id
        }
        forked_outputs = {row.session_id: self.outputs.copy(row.source_session_id) for row in rows} if forks else {}
        offset = 0
        for row in rows:
            forked = forks.pop(row.session_id, None) if forks else None
            is_admitted = False
            try:
                session = self._session_of(row, step, queued.blocks, now_s, forked, is_ring_step=is_ring_step)
                if session is not None:
                    if samples and session.request.sampler is None and row.num_result_tokens:
                        raise MalformedMessage("samples", "the session was opened without a sampler")
                    if ring is not None:
                        session.ring = ring
                    admitted.rows.append((row, session, offset))
                    is_admitted = True
            except CorollaError as error:
                self.faults.send(step, error, [row], queued.item.sender)
            if is_admitted and forked is not None:
                self.outputs.replace(row.session_id, forked_outputs[row.session_id])
            elif isinstance(forked, SessionCache):
                forked.clear()
            offset += row.num_tokens
        return admitted

    def _is_copy(self, step: pb.Step) -> bool:
        """The step repeats an earlier step. Only the earlier one is computed and answered."""
        is_new = [
            self.sessions.note_step(_session_id(step, row), row.epoch, step.client_id, step.step_id)
            for row in step.rows
        ]
        return not all(is_new)

    def _session_of(
        self,
        row: pb.StepRow,
        step: pb.Step,
        blocks: Span,
        now_s: float,
        forked: SessionCache | CorollaError | None,
        *,
        is_ring_step: bool,
    ) -> HopSession[SessionCache] | None:
        """Returns the session in which a row is computed; None if no client waits for the row.

        If the row must not be computed, it raises a CorollaError, which the client then gets.
        """
        client_id, epoch, position = step.client_id or row.client_id, row.epoch, row.position
        if is_ring_step and not self.sessions.takes_ring_step(row.session_id, epoch, client_id, position):
            return None
        if isinstance(forked, CorollaError):
            raise forked
        return self.sessions.for_step(
            _session_id(step, row), epoch, client_id, position, row.num_tokens, blocks, now_s, forked,
            num_drafts=max(0, row.num_result_tokens - 1), step_id=step.step_id,
        )  # fmt: skip

    def _fork(self, row: pb.StepRow, client_id: bytes, blocks: Span) -> SessionCache | CorollaError:
        try:
            return self.sessions.fork(row.source_session_id, row.session_id, client_id, blocks)
        except CorollaError as error:
            return error


def _session_id(step: pb.Step, row: pb.StepRow) -> bytes:
    """The session in which this hop computes a row. Bit 0 of `scratch_hops` stands for this hop."""
    return row.scratch_session_id if step.scratch_hops & 1 else row.session_id
