"""Lets a block server leave: it refuses new sessions and hands its own over, so that no server computes them again."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.block_server.engine import Engine
from corolla.block_server.handover.sender import HandoverLink, HandoverLinks, HandoverSender
from corolla.block_server.handover.standbys import Standbys
from corolla.block_server.hop_session import HopSession, SessionState
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import PeerTable
from corolla.block_server.registration import Registration
from corolla.block_server.sessions import SessionTable
from corolla.cache.prefixes import PrefixKey
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError, HopSessionLost, SessionBusy, SessionNotFound
from corolla.chassis.handlers import call_path
from corolla.chassis.tracing import spans
from corolla.planning.candidates import candidates
from corolla.planning.planner import Candidate
from corolla.planning.standbys import takers_for
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2, router_pb2
from corolla.wire.numerics import UNKNOWN, Numerics

log = logging.getLogger(__name__)

_NUM_AT_A_TIME: Final = 4
_ROUND_INTERVAL_S: Final = 0.5
_POLL_INTERVAL_S: Final = 0.02
_FAREWELL_S: Final = 2.0
_HURRY_S: Final = 1.0


@dataclass(eq=False, repr=False)
class Drain:
    """Hands the sessions of one block server over.

    In each round it tries to hand over all sessions. It repeats the rounds while a client needs this server, because a
    peer may join or get free pages. If no peer takes a session, this server serves it until the time is over; then its
    client replays it elsewhere.
    """

    server: router_pb2.ServerDescription
    sessions: SessionTable[SessionCache]
    engine: Engine
    peers: PeerTable
    registration: Registration
    sender: HandoverSender
    links: HandoverLinks
    metrics: BlockServerMetrics
    standbys: Standbys
    numerics: Numerics = UNKNOWN
    # Maps each session that was handed over to its version here and the server that has it now.
    _moved: dict[bytes, tuple[int, common_pb2.Hop]] = field(init=False, default_factory=dict)
    # The ids of servers that took sessions over, by the last page that these held in common with others.
    _holders: defaultdict[PrefixKey, set[str]] = field(init=False, default_factory=lambda: defaultdict(set))

    async def drain(self, timeout_s: float, *, at_once: bool = False) -> None:
        """Returns when no client needs this server any more, at the latest after `timeout_s`.

        Args:
            at_once: no answer goes on before this server has left. It tries once to hand its sessions over, for a
                second at most, and waits for no client.
        """
        self.sessions.is_draining = True
        self.registration.state = router_pb2.SERVER_STATE_DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, _HURRY_S) if at_once else timeout_s):
                with contextlib.suppress(CorollaError):
                    await self.registration.send_heartbeat()
                await (self._round() if at_once else self._rounds())
        log.info("drained", extra={"sessions_left": self.num_left})

    async def _rounds(self) -> None:
        while True:
            next_round_s = self.engine.clock() + _ROUND_INTERVAL_S
            await self._round()
            if await self._none(self._is_needed, next_round_s):
                break
        # A notified client moves at its next step. The drain need not wait for slower ones: they know the new server.
        await self._none(self._is_connected, self.engine.clock() + _FAREWELL_S)
        # This round settles sessions whose turns have ended meanwhile.
        await self._round()

    async def _none(self, is_so: Callable[[HopSession[SessionCache]], bool], until_s: float) -> bool:
        """Waits until the predicate holds for no session. Returns False if that takes longer than `until_s`."""
        while any(map(is_so, self.sessions)):
            if self.engine.clock() >= until_s:
                return False
            await asyncio.sleep(_POLL_INTERVAL_S)
        return True

    async def _round(self) -> None:
        """Tries to hand over each session that is still served here."""
        # Unclaimed sessions stay: the client of one that has arrived opens it here soon; the others are incomplete. The
        # clients of sessions for which this server stands by name other standbys.
        waiting = [
            session
            for session in self.sessions
            if not (session.is_leaving or session.is_unclaimed or session.state is SessionState.STANDBY)
        ]
        # The turns of these sessions ended before their clients were notified.
        ended = [session for session in self.sessions if session.is_idle and self._has_moved(session)]
        if not waiting and not ended:
            return
        try:
            servers = candidates(await self.registration.placement(), fingerprint=self.server.fingerprint)
        except CorollaError:
            return
        room = asyncio.Semaphore(_NUM_AT_A_TIME)

        async def hand_over(session: HopSession[SessionCache]) -> None:
            async with room:
                outcome = await self._traced(session, servers)
            self.metrics.handed_over.labels(outcome).inc()

        for session in ended:
            async with self.links.to(self._moved[session.request.session_id][1].address) as link:
                await self._settle(session, link)
        # Sessions in mid-answer come first.
        await asyncio.gather(*(hand_over(session) for session in sorted(waiting, key=lambda session: session.is_idle)))

    async def _traced(self, session: HopSession[SessionCache], servers: Sequence[Candidate]) -> str:
        """Calls `_hand_over`, and records a span of it if the session is in mid-answer and its request is traced."""
        request = session.request
        if request.trace is None or session.is_idle:
            return await self._hand_over(session, servers)
        with spans.span("handover", request.trace, blocks=str(request.blocks), server_id=self.server.server_id) as span:
            outcome = await self._hand_over(session, servers)
            _, hop = self._moved.get(request.session_id, (0, common_pb2.Hop()))
            span.note(outcome=outcome, taker=hop.address, tokens=session.cache.num_tokens)
            return outcome

    async def _hand_over(self, session: HopSession[SessionCache], servers: Sequence[Candidate]) -> str:
        request, version = session.request, session.version
        num_tokens = session.cache.num_tokens if session.is_idle else request.max_tokens
        common = session.cache.last_common_page
        usable = takers_for(
            servers, self._own, request.blocks, num_tokens, num_common=session.cache.common_end,
            holders=() if common is None else self._holders[common],
            is_guaranteed=request.tenant in self.sessions.guarantees,
        )  # fmt: skip
        standby_address = self.standbys.release(request.session_id, version)
        usable.sort(key=lambda each: each.address != standby_address)
        outcome = "refused" if usable else "no_peer"
        for each in usable:
            hop = common_pb2.Hop(server_id=each.server_id, address=each.address, span=request.blocks.to_message())
            try:
                async with self.links.to(hop.address) as link:
                    num_bytes = await self.sender.send(request.session_id, version, link)
                    self.metrics.handover_bytes.labels("out").inc(num_bytes)
                    self._moved[request.session_id] = (version, hop)
                    if common is not None:
                        self._holders[common].add(each.server_id)
                    return await self._settle(session, link)
            except HopSessionLost:
                outcome = "failed"
                break
            except CorollaError as failure:
                log.info(
                    "another server refused to take over a session",
                    extra={"address": hop.address, "reason": failure.reason},
                )
                continue
            except Exception as failure:
                # The device may fail to read these pages, and still be able to read those of other sessions.
                log.error("could not hand over a session", extra={"where": call_path(failure)})
                outcome = "failed"
                break
        # This server may have refused a step while it sent the last part; the step's client waits for this message.
        self._tell(session, pb.Moved(session_id=request.session_id, epoch=request.epoch))
        return outcome

    async def _settle(self, session: HopSession[SessionCache], link: HandoverLink) -> str:
        """Notifies the client that another server has the session now; for an idle session, notifies the router."""
        request, version = session.request, session.version
        _, hop = self._moved[request.session_id]
        if session.state is SessionState.LEAVING:
            self._tell(session, pb.Moved(session_id=request.session_id, epoch=request.epoch, hop=hop))
            return "moved"
        # The session's turn may have ended since the last part was sent.
        num_tokens = session.cache.num_tokens
        link.send(pb.Truncate(session_id=request.session_id, epoch=request.epoch, position=num_tokens, idle=True))
        try:
            await self.registration.move_session(request.session_id, request.tenant, hop)
        except SessionBusy:
            # A turn that has begun opens the session here, or a turn is about to end. A later round moves the session.
            self.sessions.cancel_leaving(request.session_id, version)
            return "failed"
        except SessionNotFound:
            # The session has just been deleted, or has ended.
            link.send(pb.Close(session_id=request.session_id, epoch=request.epoch))
            return "failed"
        except CorollaError:
            return "failed"  # the next turn replays the session
        self.engine.between_iterations(lambda: self.sessions.end(request.session_id, request.epoch))
        return "moved"

    @property
    def _own(self) -> Candidate:
        server = self.server
        return Candidate(
            server.server_id, server.address, server.fingerprint, self.sender.span, 0.0, numerics=self.numerics,
            node=server.node,
        )  # fmt: skip

    def _tell(self, session: HopSession[SessionCache], moved: pb.Moved) -> None:
        peer = self.peers.get(session.request.client_id)
        if peer is not None:
            peer.send(moved)

    @property
    def num_moved(self) -> int:
        """The number of sessions that other servers have now."""
        served = {session.request.session_id for session in self.sessions if not session.is_leaving}
        return len(self._moved.keys() - served)

    @property
    def num_left(self) -> int:
        """The number of sessions that no other server has."""
        return sum(not session.is_leaving and session.state is not SessionState.STANDBY for session in self.sessions)

    def _has_moved(self, session: HopSession[SessionCache]) -> bool:
        moved = self._moved.get(session.request.session_id)
        return session.is_leaving and moved is not None and moved[0] == session.version

    def _is_needed(self, session: HopSession[SessionCache]) -> bool:
        """A client is in the middle of an answer that needs this server, or opens the session here soon."""
        if session.is_unclaimed:
            return self.engine.clock() - session.last_used_s < _FAREWELL_S
        return session.state is SessionState.RUNNING and self._has_stream(session)

    def _is_connected(self, session: HopSession[SessionCache]) -> bool:
        """The session's client is in mid-answer, and may not know yet that another server has the session."""
        return session.state in (SessionState.RUNNING, SessionState.LEAVING) and self._has_stream(session)

    def _has_stream(self, session: HopSession[SessionCache]) -> bool:
        return self.peers.get(session.request.client_id) is not None
