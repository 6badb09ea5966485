"""Keeps the standbys of this hop's sessions up to date: it copies tokens there in the background, while steps go on."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

from corolla.block_server.handover.plan import LEAST_TOKENS, HandoverProgress, part_tokens
from corolla.block_server.handover.sender import HandoverLink, HandoverLinks, HandoverSender
from corolla.block_server.hop_session import HopSession, SessionState, nothing
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import PeerTable
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import SessionCache
from corolla.chassis.errors import CorollaError, HopSessionLost, RouteUnknown
from corolla.chassis.handlers import call_path
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb

log = logging.getLogger(__name__)

_PAUSE_S: Final = 0.02
_SESSIONS_PER_PAUSE: Final = 8
"""A session that has caught up pauses before its next part, and longer among many, so that parts hold up few steps."""
_MOST_PARTS: Final = 4
"""How many parts are copied or travel at a time, for all sessions together."""


@dataclass(eq=False, slots=True)
class _Standby:
    """The standby that a client has named for a session in one version, and the task that copies there."""

    session: HopSession[SessionCache]
    version: int
    named: pb.Standby
    progress: HandoverProgress = field(default_factory=HandoverProgress)
    task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """The session's turn or epoch has ended."""
        return self.session.version != self.version or self.session.state is not SessionState.RUNNING

    @property
    def num_sent(self) -> int:
        """How many tokens of the text, as it is now, the standby holds or is about to hold."""
        return min(self.progress.num_received, self.session.cache.num_unchanged_tokens)


@dataclass(eq=False, repr=False)
class Standbys:
    """The standbys that clients have named for the sessions of this server.

    Args:
        neighbours: knows the addresses of block servers; the server connects to no others.
        least_tokens: the fewest tokens of a part of a short text.

    Attributes:
        num_bytes: how many bytes standbys took from this server.
        num_state_bytes: how many of them were recurrent states.
    """

    sessions: SessionTable[SessionCache]
    sender: HandoverSender
    links: HandoverLinks
    peers: PeerTable
    neighbours: Neighbours
    tasks: TaskGroup
    metrics: BlockServerMetrics
    least_tokens: int = LEAST_TOKENS
    num_bytes: int = field(init=False, default=0)
    num_state_bytes: int = field(init=False, default=0)
    _by_session: dict[bytes, _Standby] = field(init=False, default_factory=dict)
    _room: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(_MOST_PARTS))

    @property
    def num_copied_tokens(self) -> int:
        """How many tokens of this hop's sessions standbys hold, or are about to hold."""
        return sum(each.progress.num_received for each in self._by_session.values())

    @property
    def lags(self) -> list[int]:
        """How many tokens its standby lacks of each session that has one."""
        standbys = self._by_session.values()
        return [max(0, each.session.cache.num_tokens - each.progress.num_received) for each in standbys]

    def name(self, control: pb.Standby) -> None:
        """Takes a client's word which server stands by for a session. Must be called between iterations."""
        session = self.sessions.get(control.session_id)
        if session is None or session.request.epoch != control.epoch or session.state is not SessionState.RUNNING:
            return
        self._forget(control.session_id)
        if not control.hop.address:
            return
        # The handover of a session that leaves counts what it has sent by the same note as a copy to a standby.
        if self.sessions.is_draining:
            self._tell(session, 0)
            return
        standby = self._by_session[control.session_id] = _Standby(session, session.version, control)
        # A step that took tokens back may have come here before this frame.
        num_held = control.num_tokens if session.rewound_step_id <= control.step_id else 0
        standby.progress.begin(num_held)
        # The standby may hold the beginning of a prompt that is not computed here yet.
        session.cache.num_unchanged_tokens = num_held
        standby.task = self.tasks.start(self._keep(standby), "copy to a standby")

    def release(self, session_id: bytes, version: int) -> str:
        """Stops copying a session that is about to be handed over. Returns the address of its standby; empty: none.

        A handover to that address sends only what the standby lacks.
        """
        standby = self._by_session.get(session_id)
        if standby is None or standby.version != version:
            return ""
        self._forget(session_id)
        address = standby.named.hop.address
        self.sender.continue_with(session_id, address, standby.named.transfer_id, standby.progress)
        return address

    def _forget(self, session_id: bytes) -> None:
        standby = self._by_session.pop(session_id, None)
        if standby is not None and standby.task is not None:
            self.tasks.cancel(standby.task)

    async def _keep(self, standby: _Standby) -> None:
        """Copies what a session settles until its turn or epoch ends, or the standby is lost."""
        session_id, address = standby.named.session_id, standby.named.hop.address
        try:
            if not await self.neighbours.finds(address):
                raise RouteUnknown("a standby is not in the placement", address)
            async with self.links.to(address) as link:
                await self._copy_all(standby, link)
            return
        except HopSessionLost:
            pass  # here or there; the client names another standby if it still needs one
        except CorollaError as failure:
            facts = {"address": address, "reason": failure.reason}
            log.info("a standby does not take a session any more", extra=facts)
        except Exception as failure:
            # The device may fail to read these pages, and still compute other sessions.
            log.error("could not copy a session to its standby", extra={"where": call_path(failure)})
        finally:
            if self._by_session.get(session_id) is standby:
                del self._by_session[session_id]
        if standby.session.version == standby.version:
            self._tell(standby.session, 0)

    async def _copy_all(self, standby: _Standby, link: HandoverLink) -> None:
        """Copies what a session settles until its turn ends. Raises as `HandoverSender.copy_settled` does."""
        session, named, has_answered = standby.session, standby.named, False
        while self.sessions.in_version(named.session_id, standby.version).state is SessionState.RUNNING:
            if not self._is_due(standby):
                if standby.num_sent and not has_answered:
                    self._tell(session, standby.num_sent)
                    has_answered = True
                await self._until_due(standby)
                continue
            async with self._room:
                num_bytes, num_state_bytes = await self.sender.copy_settled(
                    session, named.transfer_id, standby.progress, link
                )
            self.num_bytes += num_bytes
            self.num_state_bytes += num_state_bytes
            self.metrics.standbys.bytes.labels("out").inc(num_bytes)
            self.metrics.standbys.state_bytes.inc(num_state_bytes)
            if named.after_each_part and not has_answered:
                self._tell(session, standby.progress.num_received, is_part=True)

    async def _until_due(self, standby: _Standby) -> None:
        """Returns after a pause, once the next part should be copied, or the session's turn or epoch has ended."""
        session, has_changed, loop = standby.session, asyncio.Event(), asyncio.get_running_loop()

        def look() -> None:
            if standby.is_over or self._is_due(standby):
                # The compute thread looks, too: it reads the last part of a handover.
                loop.call_soon_threadsafe(has_changed.set)

        session.on_change = look
        try:
            await asyncio.sleep(_PAUSE_S * (1 + len(self._by_session) // _SESSIONS_PER_PAUSE))
            await has_changed.wait()
        finally:
            if session.on_change is look:
                session.on_change = nothing

    def _is_due(self, standby: _Standby) -> bool:
        """Enough tokens are settled for the next part of the copy."""
        num_settled = min(standby.session.num_settled_tokens, standby.session.cache.num_tokens)
        return num_settled >= standby.num_sent + part_tokens(num_settled, self.least_tokens)

    def _tell(self, session: HopSession[SessionCache], num_tokens: int, *, is_part: bool = False) -> None:
        """Tells the client how many tokens of a session its standby holds; 0: the standby is lost."""
        request = session.request
        if (peer := self.peers.get(request.client_id)) is not None:
            word = pb.Standby(
                session_id=request.session_id, epoch=request.epoch, num_tokens=num_tokens, after_each_part=is_part
            )
            peer.send(word)
