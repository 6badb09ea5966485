"""The next step of a batch, launched on a device before the present step's tokens are read.

Where one server is a whole chain, the device itself knows the next input: the tokens that it has just chosen. So it
gets the next step at once, and computes it while this process reads the tokens, sends them and admits the next steps. A
row whose answer ends is computed in vain; the numbers of a row depend on no other row.

Nothing counts as computed until the ordinary next step arrives and asks for exactly that: the same session in the same
state, at that position, with that token. Otherwise the launched step is dropped, and the ordinary one writes the same
positions again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from corolla.block_server.hop_session import HopSession
from corolla.block_server.row_sampling import ChosenTokens, RowLogits
from corolla.block_server.step_admission import AdmittedStep
from corolla.cache.store import SessionCache
from corolla.compute.base import LaunchedBatch, RowWork


@dataclass(frozen=True, slots=True)
class NextRow:
    """A row of the next step.

    Attributes:
        index: the row's index in the present step.
        session: its session, whose version is `version`.
        position: where the next step begins.
    """

    index: int
    session: HopSession[SessionCache]
    version: int
    position: int

    def work(self) -> RowWork:
        request = self.session.request
        return RowWork(self.session.cache, self.position, 1, long_factors=request.long_factors)

    def is_asked_by(self, batch: AdmittedStep, at: int, token_id: int) -> bool:
        """Returns True if the row `at` of an admitted step asks for this row, with this token."""
        row, session, _ = batch.rows[at]
        return (
            session is self.session
            and session.version == self.version
            and session.cache.num_tokens == self.position == row.position
            and row.num_tokens == row.num_result_tokens == 1
            and row.token_ids[0] == token_id
            and not (row.source_session_id or row.HasField("readout"))
        )


def next_rows(admitted: Sequence[AdmittedStep]) -> Sequence[NextRow]:
    """The rows of the next step, as far as the present step does not end their answers for certain.

    Returns no row if a row has a next step whose input the device cannot know.
    """
    found: list[NextRow] = []
    index = -1
    for batch in admitted:
        if not batch.comes_round_here:
            return ()
        for row, session, _ in batch.rows:
            index += 1
            sampler, ring, request = batch.sampler_for(row, session), session.ring, session.request
            if sampler is None or ring is None or request.adapter is not None or request.prompts is not None:
                return ()
            if sampler.speculator is not None or row.num_result_tokens > 1 or row.HasField("readout"):
                return ()
            position = row.position + row.num_tokens
            has_room = position < session.cache.num_reserved_tokens
            if sampler.num_tokens_left > 1 and position < ring.credit_end and has_room:
                found.append(NextRow(index, session, session.version, position))
    return found


class StepAhead:
    """A launched step.

    Attributes:
        began_s: when the device began to compute it, by the clock of its user.
    """

    def __init__(self, rows: Sequence[NextRow], launched: LaunchedBatch, logits: RowLogits) -> None:
        self._rows = rows
        self.launched = launched
        self.logits = logits
        self.began_s = 0.0
        self._expected: dict[bytes, tuple[int, int]] = {}

    def expect(self, outputs: Sequence[object], now_s: float) -> None:
        """Notes the tokens that the present step chose, by the outputs of all its rows, at the time of reading them."""
        self.began_s = now_s
        for number, row in enumerate(self._rows):
            output = outputs[row.index]
            if isinstance(output, ChosenTokens) and not output.sampled.is_last:
                self._expected[row.session.request.session_id] = number, output.sampled.tokens[0].token_id

    def indices_of(self, admitted: Sequence[AdmittedStep]) -> Sequence[int] | None:
        """The indices of the rows that were admitted; None if another row was admitted, too."""
        indices: list[int] = []
        for batch in admitted:
            if not batch.comes_round_here:
                return None
            for at, (row, _, _) in enumerate(batch.rows):
                number, token_id = self._expected.get(row.session_id, (-1, 0))
                if number < 0 or not self._rows[number].is_asked_by(batch, at, token_id):
                    return None
                indices.append(number)
        return indices
