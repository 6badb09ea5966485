"""A step that arrived, and its rows that may be computed."""

from dataclasses import dataclass, field

from corolla.block_server.hop_session import HopSession
from corolla.block_server.peers import Peer
from corolla.block_server.row_sampling import SessionSampler
from corolla.cache.store import SessionCache
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer


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
