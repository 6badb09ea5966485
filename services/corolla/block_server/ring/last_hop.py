"""The last hop of a ring: it makes the next step from the chosen tokens, unless it lacks credit from the client."""

from collections.abc import Iterable, Sequence

from corolla.block_server.hop_session import HopSession
from corolla.block_server.peers import Peer, PeerTable
from corolla.block_server.relay import Relay
from corolla.block_server.row_sampling import ChosenTokens
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import SessionCache
from corolla.chassis.errors import HopSessionLost
from corolla.v1 import blocks_pb2 as pb

RowChoice = tuple[pb.StepRow, HopSession[SessionCache], ChosenTokens]
"""A row that was computed here, its session, and the tokens that were chosen for it."""


class LastHop:
    """Sends the next steps of rings to their first hops."""

    def __init__(self, sessions: SessionTable[SessionCache], peers: PeerTable, relay: Relay) -> None:
        self._sessions = sessions
        self._peers = peers
        self._relay = relay

    def next_rows(self, choices: Iterable[RowChoice]) -> list[pb.StepRow]:
        """Returns the rows of the sessions' next steps. A row without credit is held until the client grants more."""
        next_rows: list[pb.StepRow] = []
        for row, session, chosen in choices:
            ring, sampled = session.ring, chosen.sampled
            if ring is None or sampled.is_last or not sampled.tokens:
                continue
            newest_id = sampled.tokens[-1].token_id
            token_ids = [newest_id, *chosen.draft_token_ids[: max(0, ring.max_step_tokens - 1)]]
            next_row = pb.StepRow(
                session_id=row.session_id,
                epoch=row.epoch,
                position=row.position + row.num_tokens - row.num_result_tokens + len(sampled.tokens),
                num_tokens=len(token_ids),
                num_result_tokens=len(token_ids),
                token_ids=token_ids,
                client_id=session.request.client_id,
            )
            if next_row.position < ring.credit_end:
                next_rows.append(next_row)
            else:
                ring.held_row = next_row
        return next_rows

    def send_next(self, step: pb.Step, rows: Sequence[pb.StepRow]) -> None:
        """Tells the first hop that its microbatch came round, and sends the next rows.

        After the step with which a client begins, it sends nothing if no rows follow: the first hop formed no
        microbatch, and waits for none.
        """
        if rows or step.ring.microbatch:
            message = pb.Next(microbatch=step.ring.microbatch, rows=rows)
            self._relay.send_next(step.blocks.start, step.ring.first_address, message)

    def on_credit(self, credit: pb.Credit, peer: Peer) -> None:
        """Lets a session's ring continue up to the new credit. Sends a fault if this hop does not hold the session."""
        session = self._sessions.get(credit.session_id)
        if session is None or session.request.client_id != peer.client_id:
            if not self._sessions.has_ended(credit.session_id, credit.epoch, peer.client_id):
                row = pb.StepRow(session_id=credit.session_id, epoch=credit.epoch, position=credit.end)
                step = pb.Step(client_id=peer.client_id)
                self._peers.send_faults(step, HopSessionLost("the session is not held here"), [row], peer)
            return
        ring = session.ring
        if session.request.epoch != credit.epoch or ring is None:
            return
        ring.credit_end = max(ring.credit_end, credit.end)
        held = ring.held_row
        if held is not None and held.position < ring.credit_end:
            ring.held_row = None
            self._relay.send_next(session.request.blocks.start, ring.first_address, pb.Next(rows=[held]))
