"""Invariants of standbys. Breaking them changes no token, but makes a loss dear."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from corolla.block_server.hop_session import HopSession, SessionState
from corolla.chain.history import History
from corolla.chain.recovery import Recovery
from corolla.chain.recovery_budget import RecoveryBudget, RecoveryReport
from corolla.chain.reservations import ChainBinding
from corolla.chain.session import ChainSession
from corolla.chassis.errors import CorollaError
from corolla.v1 import common_pb2
from corolla.wire.span import Span
from tests.simulation.cluster import Cluster, Server
from tests.simulation.scenario import Fault

SETTLED_S: Final = 1.0
"""So long after it was opened, and after the last start or death of a server, a session has standbys."""
_MOST_BARE_S: Final = 0.5
"""The longest time for which such a session is seen without one."""
MOST_LAG: Final = 12
"""The most tokens that a standby lacks, apart from those of a part that waits or travels."""
_JOBS_PER_PART: Final = 3
"""So many jobs of a server a part takes: the hop ends an iteration, reads, and forms it; the standby checks it, ends an
iteration, and writes."""
_KEEPING_BYTES: Final = 1 << 20
"""So much memory keeps the boundary activations of all sessions of a scenario."""


class StandbyInvariants:
    """Watches what standbys hold, in answers whose servers were left alone.

    Args:
        fault: is told of each violation.
        touched: the numbers of the servers to which a fault does something.

    Attributes:
        num_seen: how often a hop had the standby that it should have.
        num_used: how many losses ended at a standby that was filled.
    """

    def __init__(
        self, cluster: Cluster, fault: Callable[[str], None], touched: Callable[[Fault], frozenset[int]]
    ) -> None:
        self._cluster = cluster
        self._fault = fault
        self._touched = touched
        self._opened: dict[bytes, tuple[int, float]] = {}
        self._positions: dict[bytes, tuple[ChainSession, list[tuple[float, int]]]] = {}
        self._first_chains: dict[bytes, list[str]] = {}
        self._alive: list[str] = []
        self._unchanged_since_s = 0.0
        # When a server was first seen without a standby for a session, by that session and the server's number.
        self._bare_since_s: dict[tuple[bytes, int], float] = {}
        self.num_seen = 0
        self.num_used = 0
        scenario = cluster.scenario
        self._is_on = (
            scenario.has_standbys and scenario.has_prefix_cache
            and not (scenario.is_tight or scenario.of_release_before or scenario.has("client freeze", "client kill"))
        )  # fmt: skip

    def delivered(self, session: ChainSession) -> None:
        """A hop of a session that has gone on for a while has a standby that lacks few tokens, if a server is free."""
        now_s, identity = self._cluster.loop.time(), session.identity
        if self._positions.get(identity.session_id, (None,))[0] is not session:  # another turn
            self._positions[identity.session_id] = session, []
        self._positions[identity.session_id][1].append((now_s, session.position))
        alive = [each.server_id for each in self._cluster.servers if not each.process.is_dead]
        if alive != self._alive:
            self._alive, self._unchanged_since_s = alive, now_s
        epoch, opened_s = self._opened.get(identity.session_id, (0, 0.0))
        if epoch != identity.epoch:
            self._opened[identity.session_id] = identity.epoch, now_s
            return
        if self._is_on and now_s - max(opened_s, self._unchanged_since_s) >= SETTLED_S:
            for hop in session.chain.hops:
                self._look(session, hop)

    def _look(self, session: ChainSession, hop: common_pb2.Hop) -> None:
        session_id, blocks = session.identity.session_id, Span.from_message(hop.span)
        in_chain = {each.server_id for each in session.chain.hops}
        own = self._server(hop.server_id)
        others = [each for each in self._cluster.servers if each.server_id not in in_chain and each.span.covers(blocks)]
        if own is None or not self._is_well(own) or not all(self._is_well(each, "drain") for each in others):
            return
        held = {each.number: each.sessions.get(session_id) for each in others if not each.process.is_dead}
        copies = [each for each in held.values() if each is not None and _stands_by(each, blocks)]
        if not copies:
            free = [
                each for each in others
                if each.number in held and held[each.number] is None
                and not self._kinds(each.address) and _has_room(each)
            ]  # fmt: skip
            # The client may just have opened the session again, and the standby with it.
            now_s = self._cluster.loop.time()
            since_s = self._bare_since_s.setdefault((session_id, own.number), now_s)
            if free and now_s - since_s >= _MOST_BARE_S:
                self._fault(f"server {own.number} has no standby for a session, and server {free[0].number} is free")
            return
        self._bare_since_s.pop((session_id, own.number), None)
        lag = session.position - max(each.cache.num_tokens for each in copies)
        numbers = [each.number for each in others if held.get(each.number) in copies]
        if lag > max(self._most_lag(session_id, own.number, number) for number in numbers):
            self._fault(f"the standby of server {own.number} lacks {lag} tokens")
        self.num_seen += 1

    @contextmanager
    def losses_are_cheap(self) -> Iterator[None]:
        """A hop that is lost is replaced by its standby, if that was filled, and few tokens are computed again."""
        happen = Recovery.recover

        async def recover(
            recovery: Recovery,
            binding: ChainBinding,
            sequences: Sequence[History],
            failure: CorollaError,
            budget: RecoveryBudget,
        ) -> None:
            before, server_ids = binding.chain, [hop.server_id for hop in binding.chain.hops]
            is_first = self._first_chains.setdefault(binding.identities[0].session_id, server_ids) == server_ids
            filled = {
                server_id: each.hop
                for server_id, each in binding.standbys.by_hop.items()
                if each.is_filled and each.is_named and not self._kinds(each.hop.address)
            }
            num_recomputed, num_attempts, tell = [0], budget.num_attempts, budget.on_recovery

            def note(report: RecoveryReport) -> None:
                num_recomputed.append(report.num_recomputed_tokens)
                tell(report)

            budget.on_recovery = note
            try:
                await happen(recovery, binding, sequences, failure, budget)
            finally:
                budget.on_recovery = tell
            if self._is_on and budget.num_attempts <= num_attempts + 1:
                # A server that stood by before has not kept what it would have sent on. The client service has all.
                keeps = is_first and self._cluster.scenario.boundary_activation_bytes >= _KEEPING_BYTES
                keeps = keeps or server_ids[1:] == [hop.server_id for hop in binding.chain.hops[1:]]
                self._recovered(before, binding, filled, sequences, num_recomputed[-1] if keeps else 0)

        with patch.object(Recovery, "recover", recover):
            yield

    def _recovered(
        self,
        before: common_pb2.Chain,
        binding: ChainBinding,
        filled: dict[str, common_pb2.Hop],
        sequences: Sequence[History],
        num_recomputed: int,
    ) -> None:
        after = [hop.server_id for hop in binding.chain.hops]
        lost = [hop for hop in before.hops if hop.server_id not in after]
        # A hop that left handed its sessions over.
        if not lost or any("drain" in self._kinds(hop.address) for hop in before.hops):
            return
        if any(hop.server_id not in filled for hop in lost):
            return
        num_allowed = 0
        for hop in lost:
            standby = filled[hop.server_id]
            if standby.server_id not in after:
                self._fault(f"{hop.address} was replaced, and not by {standby.address}, which held its sessions")
                return
            number = after.index(standby.server_id)
            for index, sequence in enumerate(sequences):
                lag = sequence.position - binding.open_replies[number][index].num_cached_tokens
                most = self._most_lag(
                    binding.identities[index].session_id, self._number(hop.address), self._number(standby.address)
                )
                # What the standby lacks is computed again, and at most a page more.
                num_allowed += max(0, lag) + self._cluster.scenario.page_tokens
                if lag > most:
                    self._fault(f"{standby.address} took the place of {hop.address}, and lacked {lag} tokens")
        if num_recomputed > num_allowed:
            self._fault(f"{num_recomputed} tokens were computed again though standbys held the sessions")
        self.num_used += 1

    def _most_lag(self, session_id: bytes, hop: int, standby: int) -> int:
        """How many tokens a server may lack that stands by for another one.

        A session does not wait for its copy: a hop of slow jobs may take many short steps while one part travels. The
        next part is read only then, so what came since the one before was read is not there yet.
        """
        compute_s = self._cluster.scenario.compute_s
        copy_s = 2 * _JOBS_PER_PART * (compute_s[hop] + compute_s[standby])
        positions = self._positions[session_id][1] if session_id in self._positions else [(0.0, 0)]
        (first_s, _), (newest_s, newest) = positions[0], positions[-1]
        since = next(position for at_s, position in reversed(positions) if at_s <= newest_s - copy_s or at_s == first_s)
        return self._cluster.scenario.page_tokens + MOST_LAG + newest - since

    def _number(self, address: str) -> int:
        number: int = next(each.number for each in self._cluster.servers if each.address == address)
        return number

    def _server(self, server_id: str) -> Server | None:
        return next((each for each in self._cluster.servers if each.server_id == server_id), None)

    def _kinds(self, address: str) -> frozenset[str]:
        """What has happened to the server at an address, also before it started again."""
        number = self._number(address)
        faults = [fault for fault in self._cluster.begun if number in self._touched(fault)]
        return frozenset[str]().union(*(fault.kinds for fault in faults))

    def _is_well(self, server: Server, *kinds: str) -> bool:
        """Nothing but these makes it slow or cuts it off, although it may die and start again."""
        return self._kinds(server.address) <= {"kill", *kinds}


def _stands_by(session: HopSession[Any], blocks: Span) -> bool:
    return session.state is SessionState.STANDBY and session.request.blocks == blocks


def _has_room(server: Server) -> bool:
    pool = server.sessions.pool
    return pool.num_available > pool.num_pages // 2
